"""A stream of tar shards against a store: speed, memory, exact resumption; and its P × K batches against the exact sampler.

    python -m benchmarks.streams                  # 200,000 images of 32 × 32 pixels, 20,000 classes, about 4 minutes
    python -m benchmarks.streams --samplers       # what its batches repeat and leave out, beside those of the exact sampler
    python -m benchmarks.streams --accuracy       # R@1 on the built-in glyphs, beside the exact sampler

The images are generated into a temporary folder: uncompressed (PPM) or JPEG, in random order, 10,000 a shard. Files are in the
page cache. Reading takes place in the threads of the feeds, without a model; `training` is `xbm train` with the trunk `small`.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.measure import machine, medians
from xbm_app.data.feeds import Batches, DecodeFeed, Feed, StoreFeed
from xbm_app.data.glyphs import read_glyphs
from xbm_app.data.images import parts
from xbm_app.data.samplers import PKSampler
from xbm_app.data.store import open_store
from xbm_app.data.store_writer import prepare
from xbm_app.data.stream_sampler import StreamSampler
from xbm_app.data.tar_shards import read_shards
from xbm_app.data.transforms import Augmentation

IMAGES, CLASSES, SIDE, PER_SHARD, TESTED = 200_000, 20_000, 32, 10_000, 2_000
P, K, BUFFER, STEPS = 16, 4, 16_384, 150
SETTINGS = [
    "--trunk", "small", "--set", f"data.resize={SIDE}", "--set", f"data.crop={SIDE}", "--set", "data.augmentation=shift",
    "--set", "device=cpu", "--set", "memory.start=20", "--set", "log.every=50", "--set", "memory.ratio=0.1",
    "--set", "optim.lr=0.001", "--set", "memory.update=queue", "--set", "memory.doubt=keep", "--set", "batch.sampler=stream",
]  # fmt: skip

GLYPHS = {
    "model.trunk": "small", "model.weights": "none", "model.dim": 64, "data.augmentation": "shift", "data.resize": 32,
    "data.crop": 32, "batch.size": 32, "optim.lr": 1e-3, "memory.start": 300, "loss.reduction": "mean",
    "memory.batch_weight": 1.0, "log.every": 50, "device": "cpu",
}  # fmt: skip  # as the preset glyphs


def write_shards(root: Path, kind: str, images: int, classes: int) -> Path:
    """`root/train-000.tar` and so on: a class is a pattern, its images are noisy views; and 2,000 images of other classes."""
    draw = np.random.default_rng(0)
    patterns = draw.integers(0, 256, (classes + TESTED // 4, 8, 8, 3), dtype=np.uint8)
    parts = {"train": draw.permutation(np.arange(images) % classes), "test": classes + np.arange(TESTED) % (TESTED // 4)}
    root.mkdir(parents=True)
    for part, labels in parts.items():
        for shard, first in enumerate(range(0, len(labels), PER_SHARD)):
            with tarfile.open(root / f"{part}-{shard:03d}.tar", "w") as archive:
                for number, label in enumerate(labels[first : first + PER_SHARD].tolist(), start=first):
                    noisy = patterns[label].repeat(SIDE // 8, 0).repeat(SIDE // 8, 1).astype(np.int16)
                    noisy += draw.integers(-40, 41, noisy.shape, dtype=np.int16)
                    _add(archive, f"{number:06d}.{kind}", _encoded(noisy.clip(0, 255).astype(np.uint8), kind))
                    _add(archive, f"{number:06d}.cls", str(label).encode())
    return root


def _encoded(pixels: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, {"ppm": "PPM", "jpg": "JPEG"}[kind])
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    archive.addfile(header, io.BytesIO(content))


def read(feed: Feed, sampler: PKSampler | StreamSampler, first: int) -> None:
    for _ in Batches(feed, sampler, first, first + STEPS, workers=2):
        pass


def speeds(root: Path, kind: str, images: int, classes: int, rounds: int) -> dict[str, float]:
    """Images per second of a stream and of the store of the same images."""
    start = time.perf_counter()
    write_shards(root / kind, kind, images, classes)
    written, start = time.perf_counter() - start, time.perf_counter()
    dataset = read_shards(root / kind)
    train = dataset.train
    scanned, start = time.perf_counter() - start, time.perf_counter()
    read_shards(root / kind)
    indexed = time.perf_counter() - start
    print(f"{kind}: written in {written:.0f} s; headers read in {scanned:.1f} s, again from the index in {indexed:.1f} s")
    store = open_store(prepare(train, root / "store" / "train", SIDE, quiet=True), train)
    prepare(dataset.protocols[0].query, root / "store" / "test", SIDE, quiet=True)
    how = Augmentation("shift", resize=SIDE, crop=SIDE, flip=False, padding=2)
    feeds = {"store": StoreFeed(store, how), "stream": DecodeFeed(train, how)}
    samplers = {
        "store": PKSampler(train.labels, P, K, seed=0),
        "stream": StreamSampler(train.labels, train.shards(), P, K, seed=0, buffer=BUFFER),
    }
    place = {"step": 0}

    def reads(name: str) -> None:
        read(feeds[name], samplers[name], place["step"])
        place["step"] += STEPS if name == "stream" else 0

    for sampler in samplers.values():
        sampler.batch(0)
    seconds = medians({name: lambda name=name: reads(name) for name in feeds}, repeats=rounds, warm_up=1)
    return {name: STEPS * P * K / value for name, value in seconds.items()}


# ---------------------------------------------------------------- training


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "xbm", "train", *map(str, words)]


def trained(words: Sequence[str], kill_when: Path | None = None) -> float:
    """Runs `xbm train`, or kills it once a file is there; returns the peak of its resident memory in bytes."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while kill_when is not None and process.poll() is None and not kill_when.exists():
        time.sleep(0.1)
    if kill_when is not None:
        process.kill()
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != (0 if kill_when is None else -9):
        raise SystemExit(said)
    return usage.ru_maxrss * 1024


def same_state(one: object, other: object) -> bool:
    """Whether two checkpoints are equal, bit for bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
    return one == other or (one != one and other != other)


def training(root: Path, kind: str, iterations: int) -> None:
    """Trains on the stream, once in one go and once killed and resumed, and on the store."""
    settings = [*SETTINGS, "--set", f"optim.iterations={iterations}", "--set", f"log.checkpoint_every={iterations // 3}"]
    data = ["--data", root / kind, "--quiet"]
    peak = trained(command(*data, *settings, "--out", root / "whole"))
    ended = root / "ended"
    trained(command(*data, *settings, "--out", ended), kill_when=ended / "checkpoints" / "last.pt")
    peak = max(peak, trained(command("--resume", ended, "--quiet")))
    trained(command(*data, *settings, "--set", "batch.sampler=pk", "--set", "data.feed=store", "--store", root / "store",
                    "--out", root / "stored"))  # fmt: skip
    states = [torch.load(root / run / "checkpoints" / "last.pt", weights_only=True) for run in ("whole", "ended")]
    rows = [(root / run / "metrics.csv").read_bytes() for run in ("whole", "ended")]
    results = {run: json.loads((root / run / "result.json").read_text()) for run in ("whole", "ended", "stored")}
    speed = {run: P * K / results[run]["seconds_per_iteration"] for run in ("whole", "stored")}
    print(f"training: {speed['whole']:.0f} images a second from the stream, {speed['stored']:.0f} from the store")
    print(f"          resident memory at most {peak / 1e9:.2f} GB; {iterations} iterations, a memory of a tenth of the images")
    exact = same_state(*states) and rows[0] == rows[1] and results["whole"]["map@r"] == results["ended"]["map@r"]
    print(f"          killed and resumed: {'the same bit for bit' if exact else 'DIFFERENT'}")


# ---------------------------------------------------------------- the sampler against the exact one


def coverage(labels: np.ndarray, shards: np.ndarray, sampler: PKSampler | StreamSampler, steps: int) -> tuple[float, float]:
    """The share of the places of a batch that repeat an image of it, and the share of the images shown in these steps."""
    shown, repeats = np.zeros(len(labels), bool), 0
    for step in range(steps):
        batch = sampler.batch(step)
        shown[batch] = True
        repeats += len(batch) - len(np.unique(batch))
    return repeats / (steps * P * K), float(shown.mean())


def samplers() -> None:
    """How batches of a stream differ from exact ones, by the buffer and the order of the images."""
    draw = np.random.default_rng(0)
    ordered = np.arange(IMAGES) * CLASSES // IMAGES
    orders = {"random": draw.permutation(ordered), "by class": ordered}
    shards = np.arange(IMAGES) // PER_SHARD
    steps = IMAGES // (P * K)
    print(f"{IMAGES:,} images of {CLASSES:,} classes, batches of {P} × {K}, one epoch")
    print(f"{'order':10}{'buffer':>10}{'repeated':>10}{'shown':>10}")
    for order, labels in orders.items():
        for buffer in (2_048, 16_384, 65_536):
            sampler = StreamSampler(labels, shards, P, K, 0, buffer)
            start = time.perf_counter()
            repeated, shown = coverage(labels, shards, sampler, steps)
            cost = (time.perf_counter() - start) / steps
            print(f"{order:10}{buffer:>10,}{repeated:>10.1%}{shown:>10.1%}   {1e3 * cost:.2f} ms a batch")
    repeated, shown = coverage(ordered, shards, PKSampler(ordered, P, K, 0), steps)
    print(f"{'any':10}{'exact':>10}{repeated:>10.1%}{shown:>10.1%}")


def glyph_shards(root: Path, order: str) -> Path:
    """The built-in glyphs as shards, their training images in random order or class after class."""
    dataset = read_glyphs()
    for part, images in parts(dataset).items():
        numbers = np.arange(len(images))
        if part == "train" and order == "random":
            numbers = np.random.default_rng(0).permutation(numbers)
        root.mkdir(parents=True, exist_ok=True)
        for shard, chosen in enumerate(np.array_split(numbers, 8)):
            with tarfile.open(root / f"{part}-{shard}.tar", "w") as archive:
                for number in chosen.tolist():
                    pixels = np.asarray(images.open(number))
                    _add(archive, f"{number:06d}.ppm", _encoded(pixels, "ppm"))
                    _add(archive, f"{number:06d}.cls", str(images.class_names[images.labels[number]]).encode())
    return root


def accuracy(seeds: int, iterations: int) -> None:
    """R@1 on the glyphs with the exact sampler, and with streams of several buffers and orders."""
    settings = ["--set", f"optim.iterations={iterations}", "--set", f"optim.decay_at={iterations * 8 // 10}"]
    settings += [word for name, value in GLYPHS.items() for word in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        root, recalls = Path(folder), dict[str, list[float]]()
        data = {order: glyph_shards(root / order.replace(" ", "-"), order) for order in ("random", "by class")}
        arms = {"exact": ("random", "pk", 0)}
        arms |= {f"{order}, buffer {b:,}": (order, "stream", b) for order in data for b in (512, 4_096)}
        for seed in range(seeds):
            for name, (order, sampler, buffer) in arms.items():
                out = root / f"{len(recalls)}-{seed}-{time.time_ns()}"
                how = ["--set", f"batch.sampler={sampler}", "--set", f"batch.buffer={buffer or 1024}"]
                trained(command("--data", data[order], "--quiet", "--seed", seed, *settings, *how, "--out", out))
                recalls.setdefault(name, []).append(json.loads((out / "result.json").read_text())["recall@1"])
                print(f"seed {seed}, {name}: R@1 {100 * recalls[name][-1]:.2f}", flush=True)
    for name, values in recalls.items():
        print(f"{name:24} R@1 {100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1) / len(values) ** 0.5:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samplers", action="store_true", help="repeats and coverage of the batches")
    parser.add_argument("--accuracy", action="store_true", help="R@1 on the glyphs")
    parser.add_argument("--kinds", nargs="+", default=["ppm", "jpg"], choices=["ppm", "jpg"])
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.samplers:
        return samplers()
    if options.accuracy:
        return accuracy(options.seeds, options.iterations)
    torch.set_num_threads(1)
    print(machine())
    for number, kind in enumerate(options.kinds):
        with tempfile.TemporaryDirectory() as folder:
            rates = speeds(Path(folder), kind, options.images, options.images // 10, options.rounds)
            ratio = rates["stream"] / rates["store"]
            print(f"{kind}: {rates['stream']:.0f} images/s from the stream, {rates['store']:.0f} from the store: {ratio:.0%}")
            if number == 0:
                training(Path(folder), kind, options.iterations)


if __name__ == "__main__":
    main()
