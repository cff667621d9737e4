"""Uses of parameters in a forward pass: found, and their gradients caught in the backward pass."""
