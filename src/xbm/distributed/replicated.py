"""The whole memory on every rank, the same bit for bit."""

from typing import Any

import torch
from torch import Tensor

from xbm.distributed.gather import gather_named
from xbm.distributed.ranks import Ranks, the_ranks
from xbm.memory import CrossBatchMemory


class ReplicatedMemory(CrossBatchMemory):
    """A memory to which every rank adds its batch and of which every rank holds all: the ranks' rows go in in their order.

    It is called like `CrossBatchMemory`, on all ranks alike; losses meet it through `GlobalLoss`. Keep it outside
    DistributedDataParallel, which would send its buffers around anew each step. With update="backprop" `step` all-reduces the
    rows' gradient, M × D numbers.

    Example:
        >>> memory = ReplicatedMemory(size=3, dim=2)
        >>> memory.enqueue(torch.eye(2), torch.tensor([7, 8]), ids=torch.tensor([0, 1]))
        >>> memory.labels.tolist()
        [7, 8]
    """

    def __init__(self, size: int, dim: int, update: str = "queue", *, ranks: Ranks | None = None, **same: Any) -> None:
        super().__init__(size, dim, update, **same)
        self.ranks = the_ranks() if ranks is None else ranks

    @torch.no_grad()
    def enqueue(self, embeddings: Tensor, labels: Tensor, ids: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Writes the ranks' embeddings (m, D), in the order of the ranks; some ranks may have none."""
        batch = gather_named(self.ranks, self.dim, embeddings, labels, ids, mask)
        super().enqueue(batch.embeddings, batch.labels, batch.ids, batch.mask)

    @torch.no_grad()
    def step(self) -> None:
        """After `backward`: the gradients of all ranks, summed, move the rows of each alike."""
        if self.update == "backprop":
            gradient = torch.zeros_like(self.rows) if self.rows.grad is None else self.rows.grad
            self.rows.grad = self.ranks.sum(gradient, "gradient of the rows")
        super().step()
