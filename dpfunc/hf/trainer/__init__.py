"""The Trainer of Transformers with private steps."""
