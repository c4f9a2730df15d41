"""CUDA graphs: a training step of a small network is hundreds of kernels that take longer to launch than to run.

`Recorded` runs the first steps eagerly, which lets every library choose its kernels, and captures the next one. From then on
a step is two small copies (which images, which step) and one launch. Warm-up and memory phase are captured separately.
`Replayed` does the same for forward passes without gradient: filling the memory, measuring the drift.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from xbm_app.data.feeds import ResidentFeed

if TYPE_CHECKING:
    from xbm_app.train.job import Iteration, Job

PLAIN_STEPS = 3  # steps before one is captured
PLAIN_PASSES = 2  # forward passes per input shape before one is captured

Learn = Callable[["Job", "Iteration", bool], Tensor]  # (job, data, memory on?) -> anchors


def why_not(job: "Job") -> str | None:
    """Why steps cannot be recorded, if they cannot."""
    if job.device.type != "cuda":
        return "only a GPU has graphs"
    if job.ranks.world > 1:
        return f"{job.ranks.world} processes talk to each other within it; nor is batch norm fused, which is over all of them"
    if not isinstance(job.feed, ResidentFeed):
        return "the images are not on the device"
    if job.scaler.is_enabled():
        return "float16 looks at its gradients in between"
    return None


class Recorded:
    """Calls `learn` for one step after the other, by itself or as a recorded graph: the same operations on the same data."""

    def __init__(self, job: "Job", learn: Learn, say: Callable[[str], None]) -> None:
        self.job, self.learn, self.say = job, learn, say
        self.size = job.config.batch.size
        self.ids = torch.zeros((job.batches_per_step, self.size), dtype=torch.int64, device=job.device)
        self.first = torch.zeros((), dtype=torch.int64, device=job.device)  # number of the step's first batch
        self.phase: bool | None = None  # whether the memory is on
        self.plain = 0  # steps of this phase so far
        self.graph: torch.cuda.CUDAGraph | None = None
        self.anchors: Tensor | None = None
        self.given_up = False
        self.beside: torch.cuda.Stream | None = None  # where plain steps run, and are recorded: gradients stay on their stream

    def __call__(self, step: int, remembering: bool) -> Tensor:
        if remembering != self.phase:
            self.phase, self.plain, self.graph, self.anchors = remembering, 0, None, None
        first = step * len(self.ids)
        batches = [self.job.sampler.batch(first + k) for k in range(len(self.ids))]
        self.first.fill_(first)
        self._load(np.stack(batches))
        if self.graph is None and self.plain >= PLAIN_STEPS and not self.given_up:
            self._record(step)
        if self.graph is not None and self.anchors is not None:
            self.graph.replay()
            return self.anchors
        self.plain += 1
        return self._beside(lambda: self._step(step, list(self.ids)))

    def _load(self, ids: np.ndarray) -> None:
        self.ids.copy_(torch.from_numpy(ids).pin_memory(), non_blocking=True)

    def _step(self, step: int, ids: list[Tensor]) -> Tensor:
        feed = self.job.feed
        made = [(feed.train(each, self.first + k), feed.labels[each], each) for k, each in enumerate(ids)]
        return self.learn(self.job, self.job.iteration(step, made), bool(self.phase))

    def _record(self, step: int) -> None:
        torch.cuda.synchronize(self.job.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.beside, capture_error_mode="thread_local"):
                self.anchors = self._step(step, list(self.ids))
        except RuntimeError as error:
            self.given_up = True
            torch.cuda.synchronize(self.job.device)
            self.job.drop_gradients()  # they were recorded, not computed
            self.say(f"a step could not be recorded and runs kernel by kernel ({str(error).splitlines()[0]})")
            return
        self.graph = graph
        self.say(f"from iteration {step} on, a step {'with' if self.phase else 'without'} memory is one CUDA graph")

    def _beside(self, call: Callable[[], Tensor]) -> Tensor:
        """On a stream of its own, as what is recorded later wants it."""
        self.beside = self.beside or torch.cuda.Stream(self.job.device)
        self.beside.wait_stream(torch.cuda.current_stream(self.job.device))
        with torch.cuda.stream(self.beside):
            made = call()
        torch.cuda.current_stream(self.job.device).wait_stream(self.beside)
        return made


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
            if self.seen[shape] <= PLAIN_PASSES:
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
