"""The same memory on many devices, on torch.distributed: one bank on every rank, or one bank spread over the ranks."""

from xbm.distributed.gather import Gathered, gather
from xbm.distributed.launch import together
from xbm.distributed.loss import GlobalLoss
from xbm.distributed.ranks import Ranks, the_ranks
from xbm.distributed.replicated import ReplicatedMemory
from xbm.distributed.sharded import ShardedMemory

__all__ = ["Gathered", "GlobalLoss", "Ranks", "ReplicatedMemory", "ShardedMemory", "gather", "the_ranks", "together"]
