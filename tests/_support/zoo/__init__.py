"""Models as people use them, tiny, with random weights: tables for the parity tests of the engines."""
