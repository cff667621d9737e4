"""One run on many processes: the same step, the same plan, the same epsilon.

May import: its folder, lora and below. Trusted: no.
"""

from dpfunc.distributed._object_collectives import any_rank, check_same, is_writer, once, replicate, shared_key
from dpfunc.distributed.fsdp import functionalize_managed, shard, shard_frozen, unshard
from dpfunc.distributed.ranks import Ranks, data_parallel, from_environment, sharded, shutdown

__all__ = [
    "Ranks", "any_rank", "check_same", "data_parallel", "from_environment", "functionalize_managed", "is_writer",
    "once", "replicate", "shard", "shard_frozen", "sharded", "shared_key", "shutdown", "unshard",
]  # fmt: skip
