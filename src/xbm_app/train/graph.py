"""A whole step as one CUDA graph: a small network's step is hundreds of kernels that start slower than they run.

The first steps run as they are, which also lets every library choose its kernels; the next one is recorded, and from then on
a step is two small copies (which images, which step) and one start. Warm-up and memory phase are recorded separately.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from xbm_app.data.feeds import ResidentFeed
from xbm_app.train.job import Iteration, Job

PLAIN = 3  # steps before one is recorded

Learn = Callable[[Job, Iteration, bool], Tensor]  # one step: an iteration's data, whether the memory is on; gives the anchors


def why_not(job: Job) -> str | None:
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

    def __init__(self, job: Job, learn: Learn, say: Callable[[str], None]) -> None:
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
        if self.graph is None and self.plain >= PLAIN and not self.given_up:
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
