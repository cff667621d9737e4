"""Time and memory of dpfunc's engines and of other libraries, on the same tensors: `python -m benchmarks.engines`."""
