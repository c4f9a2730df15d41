"""A model's forward pass as a CUDA graph, for the many passes without gradient that a run makes beside its steps: filling the
memory, looking at the drift."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PLAIN = 2  # passes with inputs of a shape before one is recorded


class Replayed(nn.Module):
    """The model, its passes recorded by the shape of their input. What it returns is overwritten by its next call.

    Only for a model whose mode, train or eval, does not change in between, and under `torch.no_grad()`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: dict[torch.Size, int] = {}
        self.recorded: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_cuda:
            return self.model(images)
        with without_trials():
            return self._replayed(images)

    def _replayed(self, images: Tensor) -> Tensor:
        shape = images.shape
        if shape not in self.recorded:
            self.seen[shape] = self.seen.get(shape, 0) + 1
            if self.seen[shape] <= PLAIN:
                return self.model(images)
            self.recorded[shape] = self._record(images)
        graph, given, made = self.recorded[shape]
        given.copy_(images)
        graph.replay()
        return made

    def _record(self, images: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        given, graph = images.clone(memory_format=torch.preserve_format), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(images.device)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = self.model(given)
        return graph, given, made


@contextmanager
def without_trials() -> Iterator[None]:
    """For passes that are too few for it to pay to try out convolutions, which cuDNN would do anew for every shape and type."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
