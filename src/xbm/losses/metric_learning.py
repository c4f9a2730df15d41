"""Any loss of pytorch-metric-learning against our memory."""

from collections.abc import Callable

from torch import Tensor, nn

from xbm.engine.pairing import pair
from xbm.memory import CrossBatchMemory


class MetricLearningLoss(nn.Module):
    """Wraps a pair or triplet loss of pytorch-metric-learning so that it is called like ours.

    The pairs are those of this package: an anchor's own copy is excluded by id before anything is mined or weighted. They are
    passed as lists, which waits for the device and takes memory; the losses of this package do neither.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.losses import ContrastiveLoss
        >>> loss_fn = MetricLearningLoss(ContrastiveLoss())
        >>> v, labels = torch.nn.functional.normalize(torch.randn(4, 8)), torch.tensor([0, 0, 1, 1])
        >>> memory = CrossBatchMemory(size=10, dim=8)
        >>> memory.enqueue(v, labels)
        >>> loss_fn(v, labels, memory).shape
        torch.Size([])
    """

    def __init__(self, loss: Callable, exclude: str | None = None) -> None:
        super().__init__()
        self.loss, self.exclude = loss, exclude

    def forward(
        self, anchors: Tensor, labels: Tensor, memory: CrossBatchMemory | None = None, *, ids: Tensor | None = None
    ) -> Tensor:
        pairing = pair(anchors, labels, memory, ids, self.exclude)
        positive, negative = pairing.masks()  # (M, m)
        (k, i), (j, a) = positive.nonzero(as_tuple=True), negative.nonzero(as_tuple=True)
        rows = pairing.rows.to(anchors.dtype)
        if len(rows) == 0 or len(anchors) == 0:
            return anchors.sum() * 0
        return self.loss(anchors, labels, indices_tuple=(i, k, a, j), ref_emb=rows, ref_labels=pairing.row_labels)
