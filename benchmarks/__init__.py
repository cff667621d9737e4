"""Measurements: run from the root of the repository as `python -m benchmarks.engines` and the like.

A regular package, since an installed library brings one of the same name that would go before a bare folder.
"""
