"""Versions in use, and checks for what some versions of torch lack, made before anything is spent."""

import inspect
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from dpfunc.errors import UnsupportedModel


@cache
def installed() -> dict[str, str]:
    """Versions of this library and of torch; a source tree that is not installed has none."""
    try:
        own = version("dpfunc")
    except PackageNotFoundError:
        own = "not installed"
    return {"dpfunc": own, "torch": str(torch.__version__)}


def check_sharding() -> None:
    """Check that torch lays out and saves tensors that are split over processes as dpfunc needs it."""
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    needed = ((distribute_tensor, "src_data_rank"), (fully_shard, "ignored_params"), (save, "no_dist"))
    lacking = [
        f"{function.__name__}({name}=...)" for function, name in needed
        if name not in inspect.signature(function).parameters
    ]  # fmt: skip
    if lacking:
        raise UnsupportedModel(
            f"Expected a torch that has {', '.join(lacking)}, got torch {torch.__version__}. Sharded models and "
            f"checkpoints need a newer one (2.13 was tried); dpfunc.distributed.data_parallel() does not. Nothing "
            "was spent."
        )
