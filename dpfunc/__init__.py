"""Differential privacy for PyTorch as pure functions."""
