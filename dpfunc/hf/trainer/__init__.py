"""The Trainer of Transformers with private steps.

May import: its folder, budget, evidence, rehearsal, release and below. Privacy depends on it: no.
"""
