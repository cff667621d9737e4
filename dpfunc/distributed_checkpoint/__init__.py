"""Checkpoints of runs on several processes, which any other number of processes can load."""

from dpfunc.distributed_checkpoint.loading import load_sharded
from dpfunc.distributed_checkpoint.saving import save_sharded

__all__ = ["load_sharded", "save_sharded"]
