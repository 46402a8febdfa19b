"""The trainer agent: evidence in, proposals out. Today: rules that are data."""
