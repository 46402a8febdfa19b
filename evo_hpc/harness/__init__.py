"""The harness: analyzers as folders of templates over DuckDB, what they found, and the numbered sets of them."""
