"""Published figures, run again with the settings of their papers: `python -m benchmarks.published`."""
