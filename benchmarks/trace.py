"""How many files a loss call and a training step pass through: the distance a reader has to travel.

    python -m benchmarks.trace [--calls]

Counting rule: Python frames of `src/` that are entered in the main thread, in order. A *change of file* is a frame whose file
differs from that of the frame entered before it. The loss call is forward only, against a full memory, with ids. On the GPU
engine, a kernel launch counts as one frame, `Kernel.__call__`: on a GPU the kernel's body is not Python, so frames below
Triton's interpreter are left out. A training step is what happens between two optimizer steps in the middle of a run, where
nothing is logged or saved; there, a call of the library counts as its first frame, since what is behind it is the loss call's.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

SOURCE = f"{Path(__file__).parents[1] / 'src'}{os.sep}"
LIBRARY = f"{SOURCE}xbm{os.sep}"
INTERPRETER = "triton.runtime.interpreter"
MEASURED_STEP = 12  # of the training run


class Trace:
    """The frames of `src/` that were entered, as (file, function)."""

    def __init__(self, library: bool) -> None:
        self.frames: list[tuple[str, str]] = []
        self.library = library  # whether frames behind a call of the library count

    @contextmanager
    def on(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        sys.setprofile(self._enter)

    def stop(self) -> None:
        sys.setprofile(None)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE):
            return
        caller = frame.f_back
        while caller is not None:
            if caller.f_globals.get("__name__") == INTERPRETER:
                return
            if not self.library and caller.f_code.co_filename.startswith(LIBRARY):
                return
            caller = caller.f_back
        self.frames.append((code.co_filename.removeprefix(SOURCE), code.co_name))

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.frames))

    @property
    def changes(self) -> int:
        return sum(a != b for (a, _), (b, _) in zip(self.frames, self.frames[1:]))

    def show(self, name: str, calls: bool) -> None:
        print(f"{name}: {len(self.files)} files, {self.changes} changes of file")
        if not calls:
            print(f"    {', '.join(self.files)}")
            return
        before = None
        for file, function in self.frames:
            print(f"    {file:40s} {function}" if file != before else f"    {'':40s} {function}")
            before = file


def batch(size: int = 64, dim: int = 64, images: int = 10_000) -> tuple[Tensor, Tensor, Tensor]:
    anchors = F.normalize(torch.randn(size, dim)).requires_grad_()
    return anchors, torch.randint(0, 50, (size,)), torch.randint(0, images, (size,))


def loss_call(engine: str) -> Trace:
    """The second call of the contrastive loss against a full queue, forward only."""
    from xbm import ContrastiveLoss, CrossBatchMemory

    if engine == "triton":
        import tests.xbm.engine.triton.interpreter_fixes  # noqa: F401 (lets the interpreter work)
    torch.manual_seed(0)
    size = 10_000 if engine == "streaming" else 512  # the interpreter is slow
    memory, loss_fn = CrossBatchMemory(size, dim=64), ContrastiveLoss(engine=engine)
    while not memory.is_full:
        anchors, labels, ids = batch()
        memory.enqueue(anchors.detach(), labels, ids)
    loss_fn(anchors, labels, memory, ids=ids)
    trace = Trace(library=True)
    with trace.on():
        loss_fn(anchors, labels, memory, ids=ids)
    return trace


def training_step(train: Callable[[Path], object] | None = None) -> Trace:
    """One iteration of `xbm train` on the built-in glyphs, with the contrastive loss and a queue."""
    trace, steps = Trace(library=False), 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == MEASURED_STEP:
            trace.start()
        elif steps == MEASURED_STEP + 1:
            trace.stop()

    hook = register_optimizer_step_post_hook(count)
    with tempfile.TemporaryDirectory() as folder:
        try:
            (train or train_glyphs)(Path(folder) / "run")
        finally:
            trace.stop()
            hook.remove()
    return trace


def train_glyphs(folder: Path) -> None:
    from xbm_app.train.config import override
    from xbm_app.train.loop import train
    from xbm_app.train.presets import preset

    settings = {
        "optim.iterations": 18, "memory.start": 0, "memory.update": "queue", "memory.doubt": "keep", "memory.fill": False,
        "log.every": 100, "log.checkpoint_every": 100, "device": "cpu",
    }  # fmt: skip
    train(override(preset("glyphs"), settings), folder, quiet=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="print every frame")
    calls = parser.parse_args().calls
    loss_call("streaming").show("loss call, CPU", calls)
    loss_call("triton").show("loss call, GPU engine (interpreted)", calls)
    training_step().show("training step, CPU", calls)


if __name__ == "__main__":
    main()
