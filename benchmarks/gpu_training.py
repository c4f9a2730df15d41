"""The paper's training on a GPU at full size, on random images: time and memory of a step, and a whole schedule.

    python -m benchmarks.gpu_training table --out DIR      GoogLeNet with and without memory: milliseconds, peak memory
    python -m benchmarks.gpu_training schedule --out DIR   34,000 iterations from a prepared store, end to end

59,551 images as in Stanford Online Products, 5 per class, 256 × 256. A step is that of `xbm train`: crops and flips on the
device, bfloat16, loss in the batch and against the memory with all statistics, enqueue, Adam.
"""

import argparse
import csv
import gc
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_losses import about
from xbm_app.data.images import Dataset, ImageSet, Protocol
from xbm_app.data.store import prepare
from xbm_app.progress import Console
from xbm_app.train.config import Config, override
from xbm_app.train.finish import finish
from xbm_app.train.loop import run_loop, steps
from xbm_app.train.metrics import Metrics
from xbm_app.train.presets import preset
from xbm_app.train.state import RunState

TRAIN, TEST, SIDE = 59_551, 60_502, 256


class Repeated:
    """Behaves like an array of N images of which only some are different, for readers that index one image at a time."""

    def __init__(self, count: int, different: int, side: int) -> None:
        self.shape, self.ndim = (count, side, side, 3), 4
        self.some = np.random.default_rng(0).integers(0, 256, (different, side, side, 3), np.uint8)

    def __len__(self) -> int:
        return self.shape[0]

    def tobytes(self) -> bytes:
        return self.some.tobytes()

    def __getitem__(self, index: int) -> np.ndarray:
        return self.some[index % len(self.some)]


def random_images(name: str, count: int, side: int, different: int = 512) -> ImageSet:
    labels = np.arange(count) // 5
    return ImageSet(name, labels, [str(k) for k in range(labels[-1] + 1)], pixels=Repeated(count, different, side))


def config_of(**settings: Any) -> Config:
    plain = {
        "model.weights": "none",
        "memory.start": 0,
        "memory.fill": False,
        "data.feed": "resident",
        "memory.batch_weight": 1.0,
    }
    return override(preset("sop"), {**plain, **{name.replace("__", "."): value for name, value in settings.items()}})


def fill(run: RunState) -> None:
    """Fills the memory as in the middle of training: every row written, few rows near any anchor."""
    if run.memory is None:
        return
    memory, M = run.memory, run.memory.size
    for rows in memory.rows.split(1 << 18):
        rows.copy_(torch.nn.functional.normalize(torch.randn(rows.shape, device=rows.device)))
    memory.row_labels.copy_(torch.arange(M, device=run.device) // 5)
    memory.row_ids.copy_(torch.arange(M, device=run.device) % TRAIN)
    memory.stamps.fill_(0)
    memory.count.fill_(M)


class RecordingConsole(Console):
    """Records the messages of a run, such as which path its steps take."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.messages: list[str] = []

    def say(self, sentence: str) -> None:
        self.messages.append(sentence)


def step_of(settings: dict[str, Any], images: ImageSet, folder: Path, repeats: int, each: int) -> dict[str, Any]:
    """Returns milliseconds per iteration, and peak memory without the images."""
    config = config_of(**settings)
    dataset = Dataset("sop", images, (Protocol("none", images, (1,)),))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    run = RunState(config, dataset, folder)
    console = RecordingConsole(config.optim.iterations, 0, quiet=True)
    fill(run)
    held = len(images) * SIDE * SIDE * 3
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    learn_next, number, times = steps(run, 0, console), 0, []
    run.model.train()
    for repeat in range(repeats + 1):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(each):
            run.set_learning_rate(number)
            learn_next(number, run.memory is not None)
            number += 1
        last.record()
        torch.cuda.synchronize()
        if repeat:  # the first repeat captures the graph
            times.append(first.elapsed_time(last) / each)
    peak = torch.cuda.max_memory_allocated() - held - before
    bank = 0 if run.memory is None else sum(b.numel() * b.element_size() for b in run.memory.buffers())
    return {"ms": statistics.median(times), "least": min(times), "most": max(times), "peak_gb": peak / 1e9,
            "bank_gb": bank / 1e9, "path": console.messages, "repeats": times}  # fmt: skip


TABLE: dict[str, dict[str, Any]] = {
    "no memory": {"memory__ratio": 0.0},
    "R_M = 1 %": {"memory__ratio": 0.01},
    "R_M = 100 %": {},
    "1,000,000 rows": {"memory__ratio": 1_000_000 / TRAIN},
    "no memory, again": {"memory__ratio": 0.0},
    "batch 256, no memory": {"memory__ratio": 0.0, "batch__size": 256},
}


def table(out: Path, only: list[str], repeats: int = 12, each: int = 25) -> None:
    images, cases = random_images("random train", TRAIN, SIDE), []
    with (out / "training.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "repeat", "milliseconds"])
        for name in only or TABLE:
            case = step_of(TABLE[name], images, out, repeats, each)
            writer.writerows([name, k, f"{ms:.4f}"] for k, ms in enumerate(case.pop("repeats")))
            cases.append({"case": name, **case})
            print(cases[-1], flush=True)
            (out / "training.json").write_text(json.dumps({**about(), "cases": cases}, indent=1))


def schedule(out: Path, iterations: int, train_images: int, test_images: int, side: int, crop: int) -> None:
    """Times `xbm train` from opening a prepared store to R@K."""
    store, folder = out / "store", out / "run"
    sets = {"train": random_images("random train", train_images, side), "test": random_images("random test", test_images, side)}
    for name, images in sets.items():
        prepare(images, store / name, side, quiet=True)
    print("prepared", flush=True)
    begun = time.time()
    config = config_of(data__store=str(store), data__resize=side, data__crop=crop, optim__iterations=iterations,
                       memory__start=1000, memory__fill=True, log__every=500, log__checkpoint_every=17_000)  # fmt: skip
    dataset = Dataset("random", sets["train"], (Protocol("leave one out", sets["test"], (1, 10, 100, 1000)),))
    run = RunState(config, dataset, folder)
    ready = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    with Metrics(folder, 0, config) as metrics, Console(iterations, 0, quiet=False) as console:
        run_loop(run, 0, metrics, console)
        trained = time.time()
        result = finish(run, console)
    seconds = {"load": ready - begun, "train": trained - ready, "score": time.time() - trained, "in all": time.time() - begun}
    lines = list(csv.DictReader((folder / "metrics.csv").open()))
    summary = {**about(), "iterations": iterations, "images": train_images, "seconds": seconds, "recall@1": result["recall@1"],
             "ms_per_iteration": 1000 * seconds["train"] / iterations, "last": lines[-1]}  # fmt: skip
    (out / "schedule.json").write_text(json.dumps(summary, indent=1))
    shutil.copy(folder / "metrics.csv", out / "schedule.csv")
    shutil.rmtree(store)
    shutil.rmtree(folder)
    print(json.dumps(summary, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["table", "schedule"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], choices=TABLE)
    parser.add_argument("--iterations", type=int, default=34_000)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if a.part == "table":
        table(a.out, a.only)
    else:
        schedule(a.out, a.iterations, TRAIN, TEST, SIDE, 224)


if __name__ == "__main__":
    main()
