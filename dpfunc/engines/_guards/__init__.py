"""Guards around a loss: rows computed alone and compared, other processes, hidden state, modes of torch."""
