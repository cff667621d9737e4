"""Guards around a loss: rows computed alone and compared, other processes, hidden state, modes of torch.

May import: its folder, batches, rng and below. Privacy depends on it: no.
"""
