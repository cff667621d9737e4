"""What each mechanism gains at the same epsilon: `python -m benchmarks.mechanisms`."""
