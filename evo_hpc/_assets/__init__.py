"""Links to the repository's folders of data (templates, analyzers, campaigns, memory); copies of them in a wheel."""
