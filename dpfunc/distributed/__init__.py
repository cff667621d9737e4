"""One run on many processes: the same step, the same plan, the same epsilon.

May import: its folder, lora and below. Privacy depends on it: no.
"""

from dpfunc.distributed._object_collectives import (
    all_or_none,
    any_rank,
    by_writer,
    check_same,
    check_same_data,
    is_writer,
    once,
    rank_and_size,
    replicate,
    shared_key,
)
from dpfunc.distributed.fsdp import functionalize_managed, shard, shard_frozen, unshard
from dpfunc.distributed.ranks import Ranks, data_parallel, from_environment, sharded, shutdown

__all__ = [
    "Ranks", "all_or_none", "any_rank", "by_writer", "check_same", "check_same_data", "data_parallel",
    "from_environment", "functionalize_managed", "is_writer", "once", "rank_and_size", "replicate", "shard",
    "shard_frozen", "sharded", "shared_key", "shutdown", "unshard",
]  # fmt: skip
