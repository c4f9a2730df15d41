"""The parts of the GPU benchmark that measure time. gpu_losses.py runs each in a separate process.

python -m benchmarks.gpu_times PART DIR
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_measure import Call, Record, captured, extra_megabytes, reading, timed
from benchmarks.gpu_scene import EVERY_PAIR, LOSSES, Scene, dense_step, loop_step, scene
from xbm import ContrastiveLoss, CrossBatchMemory
from xbm.losses import PairLoss

SIZES = {  # rows, columns, and memories that take turns so that none stays in the 60 MB cache
    "59551x512": (59_551, 512, 4),
    "59551x128": (59_551, 128, 12),
    "1000000x512": (1_000_000, 512, 1),
    "10000000x128": (10_000_000, 128, 1),
}


def steps(loss: PairLoss, s: Scene, stats: bool = False) -> list[Call]:
    """Returns forward and backward passes against each memory of the scene."""
    v = s.anchors.clone().requires_grad_()

    def against(memory: CrossBatchMemory) -> Call:
        def call() -> Any:
            value = loss(v, s.labels, memory, ids=s.ids, return_stats=stats)
            return torch.autograd.grad(value[0] if stats else value, v)[0]

        return call

    return [against(memory) for memory in s.memories]


def direct(loss: PairLoss, s: Scene) -> list[Call]:
    """Returns `with_gradient` calls against each memory of the scene: loss and gradient without autograd."""
    return [partial(loss.with_gradient, s.anchors, s.labels, memory, ids=s.ids) for memory in s.memories]


def in_graph(calls: list[Call], floor: float | None = None, **options: Any) -> dict[str, Any]:
    times = timed([captured(call) for call in calls], **options)
    return {**times, "over_reading": times["ms"] / floor} if floor else times


def size(out: Path, name: str) -> None:
    """Measures all cases at one size."""
    M, D, banks = SIZES[name]
    record, s = Record(out, name), scene(M, D, banks)
    floor = min(
        record.add(f"read the bank once, {k} programs a processor", lambda k=k: timed([reading(m.rows, k) for m in s.memories]))
        .get("ms", float("inf")) for k in (4, 8, 16)
    )  # fmt: skip
    record.add("an empty autograd function", lambda: timed([empty(s)]))
    record.add("an empty autograd function, autograd in one thread", lambda: alone([empty(s)]))
    for valid in ("few", "every"):
        for kind, cls in LOSSES.items():
            calls = steps(cls(**(EVERY_PAIR[kind] if valid == "every" else {})), s)
            if valid == "few":
                record.add(f"{kind}, valid pairs", lambda cls=cls: valid_pairs(cls(), s))
                record.add(f"{kind}, few valid, called plainly", lambda calls=calls: timed(calls))
                record.add(f"{kind}, few valid, called plainly, autograd in one thread", lambda calls=calls: alone(calls))
                record.add(f"{kind}, few valid, with_gradient, called plainly", lambda cls=cls: timed(direct(cls(), s)))
                record.add(f"{kind}, extra memory", lambda calls=calls: {"MB": extra_megabytes(calls[0])})
            record.add(f"{kind}, {valid} valid, in a graph", lambda calls=calls: in_graph(calls, floor))
    record.add("contrastive, statistics too, in a graph", lambda: in_graph(steps(ContrastiveLoss(), s, stats=True), floor))
    if D == 512 or M < 100_000:
        peers(record, s)


class Empty(torch.autograd.Function):
    """The least that a loss with a gradient of its own costs the host: two numbers' worth of work."""

    @staticmethod
    def forward(ctx: Any, anchors: Tensor) -> Tensor:
        ctx.gradient = anchors.detach()
        return anchors.new_empty(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return ctx.gradient * upstream


def empty(s: Scene) -> Call:
    v = s.anchors.clone().requires_grad_()
    return lambda: torch.autograd.grad(Empty.apply(v), v)[0]


def alone(calls: list[Call]) -> dict[str, Any]:
    """Called plainly, with the backward pass on the thread that asks for it: torch hands it to another one otherwise."""
    with torch.autograd.set_multithreading_enabled(False):
        return timed(calls)


def valid_pairs(loss: PairLoss, s: Scene) -> dict[str, Any]:
    _, stats = loss(s.anchors, s.labels, s.memories[0], ids=s.ids, return_stats=True)
    return {"negatives": int(stats.valid_negatives.sum()), "positives": int(stats.valid_positives.sum())}


def peers(record: Record, s: Scene) -> None:
    """Measures the same step in other implementations, in float32 on the same rows."""
    v, rows, row_labels = s.anchors.clone().requires_grad_(), s.memories[0].rows.float(), s.memories[0].row_labels
    loss = ContrastiveLoss()

    def dense() -> Any:
        return torch.autograd.grad(dense_step(loss, v, s.labels, rows, row_labels), v)

    record.add("dense torch, float32", lambda: {**timed([dense], 7), "MB": extra_megabytes(dense)})
    if len(rows) > 100_000:
        return

    def loop() -> Any:
        return torch.autograd.grad(loop_step(0.5, v, s.labels, rows, row_labels), v)

    record.add("a loop over anchors", lambda: timed([loop], 5))

    def theirs() -> dict[str, Any]:
        from pytorch_metric_learning import distances, losses

        contrastive = losses.ContrastiveLoss(pos_margin=1, neg_margin=0.5, distance=distances.CosineSimilarity())
        memory = losses.CrossBatchMemory(contrastive, rows.shape[1], memory_size=len(rows)).to("cuda")
        memory.embedding_memory.copy_(rows)
        memory.label_memory.copy_(row_labels)
        memory.has_been_filled = True

        def call() -> Any:
            return torch.autograd.grad(memory(v, s.labels), v)

        return {**timed([call], 7), "MB": extra_megabytes(call)}

    record.add("pytorch-metric-learning CrossBatchMemory", theirs)


def warm(D: int) -> None:
    """Compiles the kernels that the measurements need."""
    s = scene(59_551, D, 1)
    for cls in LOSSES.values():
        for stats in (False, True):
            steps(cls(), s, stats)[0]()
    sys.modules["xbm.engine.triton.plan"].SMALL = 0
    for cls in LOSSES.values():
        steps(cls(), scene(59_552, D, 1))[0]()


def properties(out: Path) -> None:
    """Checks host syncs, torch.compile and determinism; measures enqueue, batches, other storage types and more anchors."""
    record, s = Record(out, "properties"), scene(59_551, 512, 1)
    for kind, cls in LOSSES.items():
        (step,) = steps(cls(), s)
        record.add(f"{kind}, no host sync", lambda step=step: silent(step, s))
        record.add(f"{kind}, same bits twice", lambda step=step: {"same": torch.equal(step(), step())})
        record.add(f"{kind}, torch.compile in one graph", lambda cls=cls, step=step: compiled(cls(), step, s))
    record.add("enqueue 64 x 512", lambda: enqueue(s))
    record.add("keyed enqueue 64 x 512", lambda: keyed("moving_average"))
    record.add("keyed enqueue 64 x 512 and descent of 8,000 rows", lambda: keyed("backprop"))
    for kind, cls in LOSSES.items():
        record.add(f"{kind}, 64 anchors against themselves", lambda cls=cls: batch(cls(), s))
    copy = steps(ContrastiveLoss(exclude="copy"), s)
    record.add("contrastive, exclude copy", lambda: {**in_graph(copy), "plain_ms": timed(copy)["ms"]})
    for dtype in (torch.float16, torch.float32):
        calls = steps(ContrastiveLoss(), scene(59_551, 512, 3, dtype))
        record.add(f"contrastive, {dtype} bank, in a graph", lambda calls=calls: in_graph(calls))
    for times in (4, 16):
        more = Scene(*(x.repeat(times, *[1] * (x.dim() - 1)) for x in s[:3]), memories=s.memories)
        calls = steps(ContrastiveLoss(), more)
        record.add(f"contrastive, {64 * times} anchors, in a graph", lambda calls=calls: in_graph(calls))


def silent(step: Call, s: Scene) -> dict[str, Any]:
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            step()
            s.memories[0].enqueue(s.anchors, s.labels, s.ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"synchronised": False}


def compiled(loss: PairLoss, step: Call, s: Scene) -> dict[str, Any]:
    v = s.anchors.clone().requires_grad_()
    fast = torch.compile(lambda v: loss(v, s.labels, s.memories[0], ids=s.ids), fullgraph=True)
    return {"same": torch.equal(torch.autograd.grad(fast(v), v)[0], step())}


def enqueue(s: Scene) -> dict[str, Any]:
    memories = [CrossBatchMemory(1000, 512, dtype=torch.bfloat16, device=device) for device in ("cuda", "cpu")]
    for m in (64, 64, 3, 900, 64, 1500):
        arguments = torch.nn.functional.normalize(torch.randn(m, 512)), torch.randint(0, 9, (m,)), torch.arange(m)
        for memory in memories:
            memory.enqueue(*(x.to(memory.rows.device) for x in arguments))
    same = {name: torch.equal(a.cpu(), memories[1].state_dict()[name]) for name, a in memories[0].state_dict().items()}

    def call() -> None:
        s.memories[0].enqueue(s.anchors, s.labels, s.ids)

    return {**in_graph([call]), "plain_ms": timed([call])["ms"], "same": same}


def keyed(update: str) -> dict[str, Any]:
    """Compares a keyed memory with one on the CPU: repeated ids in a batch, rows with and without gradient."""
    memories = [CrossBatchMemory(8000, 512, update, momentum=0.9, device=device) for device in ("cuda", "cpu")]

    def update_memory(memory: CrossBatchMemory, arguments: tuple[Tensor, ...], gradient: Tensor) -> None:
        memory.enqueue(*arguments)
        if update == "backprop":
            memory.rows.grad = gradient
            memory.step()

    for m in (64, 64, 3, 900, 9000):
        arguments = torch.nn.functional.normalize(torch.randn(m, 512)), torch.randint(0, 9, (m,)), torch.randint(0, 8000, (m,))
        gradient = torch.randn(8000, 512) * (torch.rand(8000, 1) < 0.5)
        for memory in memories:
            update_memory(memory, tuple(x.to(memory.rows.device) for x in arguments), gradient.to(memory.rows.device))
    theirs = memories[1].state_dict()
    difference = {
        name: float((a.cpu().double() - theirs[name].double()).abs().max()) for name, a in memories[0].state_dict().items()
    }
    batch = tuple(x[:64].cuda() for x in arguments)
    on_gpu = gradient.cuda()
    return {**in_graph([lambda: update_memory(memories[0], batch, on_gpu)]), "largest_difference": difference}


def batch(loss: PairLoss, s: Scene) -> dict[str, Any]:
    v = s.anchors.clone().requires_grad_()

    def call() -> Any:
        return torch.autograd.grad(loss(v, s.labels), v)

    return {**in_graph([call]), "plain_ms": timed([call])["ms"]}


def main() -> None:
    part, out = sys.argv[1], Path(sys.argv[2])
    if part in SIZES:
        size(out, part)
    elif part.startswith("warm"):
        warm(int(part.removeprefix("warm-")))
    else:
        properties(out)


if __name__ == "__main__":
    main()
