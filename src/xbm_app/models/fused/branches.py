"""The branches of a block beside each other: each alone is too small to fill a GPU. Only inside a CUDA graph, which keeps the
branches apart in its own memory and costs nothing to start; the backward pass goes the same ways.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor


def beside(branches: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
    """What each branch makes of x."""
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return [branch(x) for branch in branches]
    here, others = torch.cuda.current_stream(x.device), _streams(x.device, len(branches) - 1)
    made: list[Tensor] = []
    for stream, branch in zip(others, branches[1:]):
        stream.wait_stream(here)
        x.record_stream(stream)
        with torch.cuda.stream(stream):
            made.append(branch(x))
    first = branches[0](x)
    for stream, each in zip(others, made):
        here.wait_stream(stream)
        each.record_stream(here)
    return [first, *made]


@lru_cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]
