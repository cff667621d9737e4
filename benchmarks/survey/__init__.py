"""Which engine `auto` chooses for hundreds of small models, why, how fast it is, and whether it is right."""
