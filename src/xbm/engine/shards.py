"""What an engine asks of the other holders of a bank whose rows are spread over several of them."""

from typing import Protocol

from torch import Tensor


class Shards(Protocol):
    """Every holder makes the same calls in the same order, with tensors of the same shape, and gets the same answer."""

    rank: int  # which of the holders this one is

    def maximum(self, x: Tensor) -> Tensor:
        """Elementwise over the holders."""
        ...

    def sum(self, x: Tensor) -> Tensor: ...

    def everyone(self, x: Tensor) -> list[Tensor]:
        """Each holder's, in their order; here the first dimension may differ."""
        ...
