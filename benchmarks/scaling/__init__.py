"""What a private step needs on many GPUs: a model of memory and traffic, and measured pieces of what it costs."""
