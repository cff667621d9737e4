"""One run on many processes: the same step, the same plan, the same epsilon."""

from dpfunc.distributed.fsdp import shard_frozen
from dpfunc.distributed.fully_sharded import functionalize_managed
from dpfunc.distributed.launch import check_same, from_environment, is_writer, once, replicate, shutdown
from dpfunc.distributed.params import shard, unshard
from dpfunc.distributed.ranks import Ranks, any_rank, data_parallel, sharded, shared_key

__all__ = [
    "Ranks",
    "any_rank",
    "check_same",
    "data_parallel",
    "from_environment",
    "functionalize_managed",
    "is_writer",
    "once",
    "replicate",
    "shard",
    "shard_frozen",
    "sharded",
    "shared_key",
    "shutdown",
    "unshard",
]
