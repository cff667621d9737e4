"""What a clipped sum launches, counted and not timed: `python -m benchmarks.launches`."""
