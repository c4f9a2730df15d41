"""Cross-batch memory on several processes with torch.distributed: a full copy on every rank, or one shard per rank."""

from xbm.distributed.distributed_memory import ReplicatedMemory, ShardedMemory
from xbm.distributed.global_loss import GlobalLoss
from xbm.distributed.ranks import Gathered, Ranks, gather, the_ranks, together

__all__ = ["Gathered", "GlobalLoss", "Ranks", "ReplicatedMemory", "ShardedMemory", "gather", "the_ranks", "together"]
