"""A stream of tar shards against a store: speed, memory, exact resumption; and its P × K batches against the exact sampler.

    python -m benchmarks.streams                  # 200,000 images of 32 × 32 pixels, 20,000 classes, about 4 minutes
    python -m benchmarks.streams --samplers       # what its batches repeat and leave out, beside those of the exact sampler
    python -m benchmarks.streams --page           # writes docs/data.md from the results of these two
    python -m benchmarks.streams --accuracy       # R@1 on the built-in glyphs, beside the exact sampler

The images are generated into a temporary folder: uncompressed (PPM) or JPEG, in random order, 10,000 a shard. Files are in the
page cache. Reading takes place in the threads of the feeds, without a model; `training` is `xbm train` with the trunk `small`.
Results of 200,000 images are kept in benchmarks/results/cpu-streams.json.
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
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.measure import machine, medians
from xbm_app.data.feeds import Batches, DecodeFeed, Feed, StoreFeed
from xbm_app.data.glyphs import read_glyphs
from xbm_app.data.images import Dataset, EncodedSet, parts
from xbm_app.data.samplers import PKSampler, StreamSampler
from xbm_app.data.store import Store, open_store, prepare
from xbm_app.data.tar_shards import read_shards
from xbm_app.data.transforms import Augmentation
from xbm_app.report.writing import recorded_device

RESULTS = Path(__file__).parent / "results" / "cpu-streams.json"
PAGE = Path(__file__).parents[1] / "docs" / "data.md"
MARKS = "<!-- figures of streams -->\n", "<!-- end of figures of streams -->\n"
IMAGES, CLASSES, SIDE, PER_SHARD, TESTED = 200_000, 20_000, 32, 10_000, 2_000
P, K, STEPS = 16, 4, 150
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


def data_of(root: Path, kind: str, images: int) -> tuple[Dataset, Store]:
    """The shards and their store, from an earlier call if they are there."""
    start = time.perf_counter()
    if not (root / kind).exists():
        write_shards(root / kind, kind, images, images // 10)
        print(f"{kind}: {images:,} images written in {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    dataset = read_shards(root / kind)
    print(f"{kind}: headers or their index read in {time.perf_counter() - start:.1f} s")
    sets = {"train": dataset.train, "test": dataset.protocols[0].query}
    stores = {part: prepare(each, root / f"{kind}-store" / part, SIDE, quiet=True) for part, each in sets.items()}
    return dataset, open_store(stores["train"], dataset.train)


def speeds(dataset: Dataset, store: Store, rounds: int) -> dict[str, float]:
    """Images per second of a stream and of the store of the same images."""
    train = dataset.train
    assert isinstance(train, EncodedSet)
    how = Augmentation("shift", resize=SIDE, crop=SIDE, flip=False, padding=2)
    feeds = {"store": StoreFeed(store, how), "stream": DecodeFeed(train, how)}
    samplers = {
        "store": PKSampler(train.labels, P, K, seed=0),
        "stream": StreamSampler(train.labels, train.shards(), P, K, seed=0),
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


def training(root: Path, runs: Path, kind: str, iterations: int) -> dict[str, Any]:
    """Trains on the stream, once in one go and once killed and resumed, and on the store."""
    settings = [*SETTINGS, "--set", f"optim.iterations={iterations}", "--set", f"log.checkpoint_every={iterations // 3}"]
    data = ["--data", root / kind, "--quiet"]
    peak = trained(command(*data, *settings, "--out", runs / "whole"))
    ended = runs / "ended"
    trained(command(*data, *settings, "--out", ended), kill_when=ended / "checkpoints" / "last.pt")
    peak = max(peak, trained(command("--resume", ended, "--quiet")))
    exactly = ["--set", "batch.sampler=pk", "--set", "data.feed=store", "--store", root / f"{kind}-store"]
    trained(command(*data, *settings, *exactly, "--out", runs / "stored"))
    states = [torch.load(runs / run / "checkpoints" / "last.pt", weights_only=True) for run in ("whole", "ended")]
    rows = [(runs / run / "metrics.csv").read_bytes() for run in ("whole", "ended")]
    results = {run: json.loads((runs / run / "result.json").read_text()) for run in ("whole", "ended", "stored")}
    speed = {run: P * K / results[run]["seconds_per_iteration"] for run in ("whole", "stored")}
    print(f"training: {speed['whole']:.0f} images a second from the stream, {speed['stored']:.0f} from the store")
    print(f"          resident memory at most {peak / 1e9:.2f} GB; {iterations} iterations, a memory of a tenth of the images")
    exact = same_state(*states) and rows[0] == rows[1] and results["whole"]["map@r"] == results["ended"]["map@r"]
    print(f"          killed and resumed: {'the same bit for bit' if exact else 'DIFFERENT'}")
    return {"images a second": speed, "peak bytes": peak, "iterations": iterations, "resumes exactly": exact}


# ---------------------------------------------------------------- the sampler against the exact one


def coverage(labels: np.ndarray, shards: np.ndarray, sampler: PKSampler | StreamSampler, steps: int) -> tuple[float, float]:
    """The share of the places of a batch that repeat an image of it, and the share of the images shown in these steps."""
    shown, repeats = np.zeros(len(labels), bool), 0
    for step in range(steps):
        batch = sampler.batch(step)
        shown[batch] = True
        repeats += len(batch) - len(np.unique(batch))
    return repeats / (steps * P * K), float(shown.mean())


def samplers() -> list[dict[str, Any]]:
    """How batches of a stream differ from exact ones, by the buffer and the order of the images."""
    draw = np.random.default_rng(0)
    ordered = np.arange(IMAGES) * CLASSES // IMAGES
    orders = {"random": draw.permutation(ordered), "by class": ordered}
    shards = np.arange(IMAGES) // PER_SHARD
    steps = IMAGES // (P * K)
    print(f"{IMAGES:,} images of {CLASSES:,} classes, batches of {P} × {K}, one epoch")
    print(f"{'order':10}{'buffer':>10}{'repeated':>10}{'shown':>10}")
    rows = []
    for order, labels in orders.items():
        for buffer in (2_048, 16_384, 65_536, CLASSES * K + 16 * P * K):
            sampler = StreamSampler(labels, shards, P, K, 0, buffer)
            start = time.perf_counter()
            repeated, shown = coverage(labels, shards, sampler, steps)
            cost = (time.perf_counter() - start) / steps
            print(f"{order:10}{buffer:>10,}{repeated:>10.1%}{shown:>10.1%}   {1e3 * cost:.2f} ms a batch")
            rows.append({"order": order, "buffer": buffer, "repeated": repeated, "shown": shown})
    repeated, shown = coverage(ordered, shards, PKSampler(ordered, P, K, 0), steps)
    print(f"{'any':10}{'exact':>10}{repeated:>10.1%}{shown:>10.1%}")
    return [*rows, {"order": "any", "buffer": None, "repeated": repeated, "shown": shown}]


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


def accuracy(seeds: Sequence[int], iterations: int) -> None:
    """R@1 on the glyphs with the exact sampler, and with streams of several buffers and orders."""
    settings = ["--set", f"optim.iterations={iterations}", "--set", f"optim.decay_at={iterations * 8 // 10}"]
    settings += [word for name, value in GLYPHS.items() for word in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        root, recalls = Path(folder), dict[str, list[float]]()
        data = {order: glyph_shards(root / order.replace(" ", "-"), order) for order in ("random", "by class")}
        arms = {"exact": ("random", "pk", 0)}
        arms |= {f"{order}, buffer {b:,}": (order, "stream", b) for order in data for b in (256, 1_024)}
        for seed in seeds:
            for name, (order, sampler, buffer) in arms.items():
                out = root / f"{len(recalls)}-{seed}-{time.time_ns()}"
                how = ["--set", f"batch.sampler={sampler}", "--set", f"batch.buffer={buffer or 1024}"]
                trained(command("--data", data[order], "--quiet", "--seed", seed, *settings, *how, "--out", out))
                recalls.setdefault(name, []).append(json.loads((out / "result.json").read_text())["recall@1"])
                print(f"seed {seed}, {name}: R@1 {100 * recalls[name][-1]:.2f}", flush=True)
    for name, values in recalls.items():
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
        print(f"{name:24} R@1 {100 * np.mean(values):.2f} ± {100 * error:.2f}")


def record(name: str, values: Any) -> None:
    """Adds figures to the results, with the machine that they are from."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {name: values, "machine": f"{machine()}, {os.cpu_count()} cores", "date": time.strftime("%Y-%m-%d")}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def figures() -> str:
    """The results as docs/data.md has them."""
    results = json.loads(RESULTS.read_text())
    ppm, jpg, trained_on = results["read ppm"], results["read jpg"], results["training"]
    exactly = "continues bit for bit" if trained_on["resumes exactly"] else "does NOT continue bit for bit"
    lines = [
        f"{IMAGES:,} images of {SIDE} × {SIDE} pixels, {CLASSES:,} classes, in shards that are in the page cache "
        f"({recorded_device(results['machine'])}, other programs ran beside it; `python -m benchmarks.streams`):\n",
        f"- **Speed of reading**, beside a store of the same images: uncompressed images {ppm['stream'] / ppm['store']:.0%} "
        f"({ppm['stream']:,.0f} of {ppm['store']:,.0f} images per second); JPEG {jpg['stream'] / jpg['store']:.0%} "
        f"({jpg['stream']:,.0f} of {jpg['store']:,.0f}), since a stream decodes each image and a store holds pixels.",
        f"- **Speed of training** in a run of {trained_on['iterations']} iterations of the network `small`: "
        f"{trained_on['images a second']['whole']:,.0f} images per second from the stream, "
        f"{trained_on['images a second']['stored']:,.0f} from the store. One run each; why is not known yet.",
        f"- **Memory** of `xbm train`, with all libraries: at most {trained_on['peak bytes'] / 1e9:.2f} GB.",
        f"- **Resuming**: a run that is killed {exactly}.\n",
        f"Batches of {P} × {K} for one epoch. *Repeated* places of a batch hold an image that is in it already; *shown* images "
        "are in at least one batch (`--samplers`):\n",
        "| order in the shards | buffer | repeated | shown |\n|---|---|---|---|",
    ]
    for row in results["samplers"]:
        buffer = "exact sampler" if row["buffer"] is None else f"{row['buffer']:,}"
        lines.append(f"| {row['order']} | {buffer} | {row['repeated']:.1%} | {row['shown']:.1%} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/data.md with the figures of the results."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    return before + MARKS[0] + figures() + MARKS[1] + rest.partition(MARKS[1])[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samplers", action="store_true", help="repeats and coverage of the batches")
    parser.add_argument("--page", action="store_true", help="write docs/data.md")
    parser.add_argument("--accuracy", action="store_true", help="R@1 on the glyphs")
    parser.add_argument("--kinds", nargs="+", default=["ppm", "jpg"], choices=["ppm", "jpg"])
    parser.add_argument("--parts", nargs="*", default=["read", "train"], help="read, train; none only makes the data")
    parser.add_argument("--folder", type=Path, help="keep the data here for another call (default: a temporary folder)")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page())
        return
    if options.samplers:
        return record("samplers", samplers())
    if options.accuracy:
        return accuracy(options.seeds, options.iterations)
    torch.set_num_threads(1)
    print(machine())
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        for number, kind in enumerate(options.kinds):
            dataset, store = data_of(folder, kind, options.images)
            if "read" in options.parts:
                rates = speeds(dataset, store, options.rounds)
                stream, stored = rates["stream"], rates["store"]
                if options.images == IMAGES:
                    record(f"read {kind}", rates)
                print(
                    f"{kind}: {stream:.0f} images a second from the stream, {stored:.0f} from the store: {stream / stored:.0%}"
                )
            if "train" in options.parts and number == 0:
                with tempfile.TemporaryDirectory() as runs:
                    trained_on = training(folder, Path(runs), kind, options.iterations)
                    if options.images == IMAGES:
                        record("training", trained_on)


if __name__ == "__main__":
    main()
