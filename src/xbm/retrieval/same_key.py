"""Which gallery rows share a query's label, or its id."""

import torch
from torch import Tensor


class SameKey:
    """For each query the gallery rows with its key, found by one sort of the keys instead of a Q × G comparison.

    Attributes:
        count: (Q,) how many there are.

    Example:
        >>> same = SameKey(torch.tensor([5, 7, 6]), torch.tensor([7, 5, 7]))
        >>> same.rows(torch.arange(3), width=2).tolist()  # 3, one behind the last row, stands for nothing
        [[1, 3], [0, 2], [3, 3]]
    """

    def __init__(self, keys: Tensor, gallery_keys: Tensor) -> None:
        ordered, self.order = gallery_keys.sort(stable=True)
        self.start = torch.searchsorted(ordered, keys)  # (Q,)
        self.count = torch.searchsorted(ordered, keys, right=True) - self.start
        self.nothing = len(gallery_keys)

    def rows(self, queries: Tensor, width: int) -> Tensor:
        """(b, width) gallery rows for the queries of these indices, (b,), in order, filled up with the number of rows."""
        place = torch.arange(width, device=queries.device)
        rows = self.order[(self.start[queries, None] + place).clamp_(max=self.nothing - 1)]
        return rows.masked_fill_(place >= self.count[queries, None], self.nothing)
