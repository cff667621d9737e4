"""Modules before and after."""

from __future__ import annotations

import torch


def snapshot(module):
    return {name: (id(value), value.detach().clone()) for name, value in module.state_dict(keep_vars=True).items()}


def same(before, after):
    return before.keys() == after.keys() and all(
        before[k][0] == after[k][0] and torch.equal(before[k][1], after[k][1]) for k in before
    )
