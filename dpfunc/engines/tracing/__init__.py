"""The proof of each step: which sample each number in memory depends on."""
