"""CUDA graphs: a training step of a small network is hundreds of kernels that take longer to launch than to run.

`RecordedStep` runs the first steps eagerly, which lets every library choose its kernels, and captures the next one. From then
on a step is two small copies (the image indices, the step number) and one launch. Steps with and without memory are captured
separately. `Replayed` does the same for forward passes without gradient: filling the memory, measuring the drift.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from xbm_app.data.feeds import ResidentFeed

if TYPE_CHECKING:
    from xbm_app.train.dataset import Batch
    from xbm_app.train.state import RunState

EAGER_STEPS = 3  # steps before one is captured
EAGER_PASSES = 2  # forward passes per input shape before one is captured

Learn = Callable[["RunState", int, "list[Batch]", bool], Tensor]  # (run, step, batches, with memory?) -> anchors


def why_not(run: "RunState") -> str | None:
    """Returns why the steps of a run cannot be recorded, or None if they can."""
    if run.device.type != "cuda":
        return "only a GPU has graphs"
    if run.ranks.world > 1:
        return f"{run.ranks.world} processes communicate within it, and batch norm over all of them is not fused"
    model, batch = run.config.model, run.config.batch
    if model.freeze == "trunk":
        return "the trunk is frozen, and a step of its features alone is short"
    if model.compile or model.checkpointing or batch.chunk:
        return "a trunk that is compiled, checkpointed or called in chunks takes steps of its own"
    if not isinstance(run.data.feed, ResidentFeed):
        return "the images are not on the device"
    if not run.counts_pairs:
        return "a loss of pytorch-metric-learning lists its pairs on the host"
    if run.scaler.is_enabled():
        return "float16 training inspects its gradients on the host"
    return None


class RecordedStep:
    """Calls `learn` step by step, eagerly or as a recorded graph: the same operations on the same data."""

    def __init__(self, run: "RunState", learn: Learn, say: Callable[[str], None]) -> None:
        self.run, self.learn, self.say = run, learn, say
        self.size = run.config.batch.size
        self.ids = torch.zeros((run.data.batches_per_step, self.size), dtype=torch.int64, device=run.device)
        self.first = torch.zeros((), dtype=torch.int64, device=run.device)  # number of the step's first batch
        self.with_memory: bool | None = None
        self.eager = 0  # steps so far, of this phase
        self.graph: torch.cuda.CUDAGraph | None = None
        self.anchors: Tensor | None = None
        self.failed = False
        # eager steps run on the stream that is recorded later: gradients stay on the stream that made them
        self.stream: torch.cuda.Stream | None = None

    def __call__(self, step: int, with_memory: bool) -> Tensor:
        if with_memory != self.with_memory:
            self.with_memory, self.eager, self.graph, self.anchors = with_memory, 0, None, None
        first = step * len(self.ids)
        self.first.fill_(first)
        self._load(np.stack([self.run.data.sampler.batch(first + k) for k in range(len(self.ids))]))
        if self.graph is None and self.eager >= EAGER_STEPS and not self.failed:
            self._record(step)
        if self.graph is not None and self.anchors is not None:
            self.graph.replay()
            return self.anchors
        self.eager += 1
        return self._on_stream(lambda: self._step(step))

    def _load(self, ids: np.ndarray) -> None:
        self.ids.copy_(torch.from_numpy(ids).pin_memory(), non_blocking=True)

    def _step(self, step: int) -> Tensor:
        feed = self.run.data.feed
        batches = [(feed.train(ids, self.first + k), feed.labels[ids], ids) for k, ids in enumerate(self.ids)]
        return self.learn(self.run, step, batches, bool(self.with_memory))

    def _record(self, step: int) -> None:
        torch.cuda.synchronize(self.run.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.anchors = self._step(step)
        except RuntimeError as error:  # whatever fails here is tried again eagerly, where it is raised if it still fails
            self.failed = True
            torch.cuda.synchronize(self.run.device)
            self.run.optimizer.zero_grad(set_to_none=True)  # the gradients were recorded, not computed
            if self.run.memory is not None:
                self.run.memory.rows.grad = None
            self.say(f"a step could not be recorded as a CUDA graph and runs kernel by kernel: {error}")
            return
        self.graph = graph
        self.say(f"from iteration {step} on, a step {'with' if self.with_memory else 'without'} memory is one CUDA graph")

    def _on_stream(self, call: Callable[[], Tensor]) -> Tensor:
        self.stream = self.stream or torch.cuda.Stream(self.run.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.run.device))
        with torch.cuda.stream(self.stream):
            result = call()
        torch.cuda.current_stream(self.run.device).wait_stream(self.stream)
        return result


class Replayed(nn.Module):
    """The model, its forward passes recorded by input shape. Its next call overwrites what it returned.

    Only for a model whose mode, train or eval, does not change between calls, and under `torch.no_grad()`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: dict[torch.Size, int] = {}
        self.recorded: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_cuda:
            return self.model(images)
        with without_benchmarking():
            return self._replayed(images)

    def _replayed(self, images: Tensor) -> Tensor:
        shape = images.shape
        if shape not in self.recorded:
            self.calls[shape] = self.calls.get(shape, 0) + 1
            if self.calls[shape] <= EAGER_PASSES:
                return self.model(images)
            self.recorded[shape] = self._record(images)
        graph, inputs, outputs = self.recorded[shape]
        inputs.copy_(images)
        graph.replay()
        return outputs

    def _record(self, images: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        inputs, graph = images.clone(memory_format=torch.preserve_format), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(images.device)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = self.model(inputs)
        return graph, inputs, outputs


@contextmanager
def without_benchmarking() -> Iterator[None]:
    """For a few passes only: cuDNN's search for the fastest convolution, anew for every shape and type, would not pay off."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
