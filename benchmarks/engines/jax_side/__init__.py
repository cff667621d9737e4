"""The half of the comparison that runs in an interpreter with JAX; nothing here imports torch or dpfunc."""
