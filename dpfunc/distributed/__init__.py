"""One run on many processes: the same step, the same plan, the same epsilon."""

from dpfunc.distributed.ranks import Ranks, any_rank, data_parallel, sharded, shared_key

__all__ = ["Ranks", "any_rank", "data_parallel", "sharded", "shared_key"]
