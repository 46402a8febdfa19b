"""The metric tables of training runs, handed to trackers. The tables are the truth: an export only copies, and may be run again."""
