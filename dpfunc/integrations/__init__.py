"""Integrations: models of Transformers, adapters of PEFT, the Trainer. Needs `dpfunc[hf]`; imported by name."""
