"""Images per second of the three feeds on this machine, compared with decoding with plain Pillow in one process.

    python -m benchmarks.feeds

500 JPEGs of 480 × 360 (noise of several wavelengths, about as large as photographs), batches of 64, 224² crops. The feeds take
turns over several rounds and the median is reported, so that other load on the machine slows all of them equally. Files are in
the page cache. Torch's own threads are disabled, because they slow down operations as small as those of plain Pillow.
"""

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.measure import medians, threads
from xbm_app.data.feeds import Batches, DecodeFeed, Feed, ResidentFeed, StoreFeed
from xbm_app.data.images import ImageSet
from xbm_app.data.parallel import default_workers
from xbm_app.data.samplers import PKSampler
from xbm_app.data.store import open_store, prepare
from xbm_app.data.transforms import IMAGENET_MEAN, IMAGENET_STD, OFFICIAL, PAPER

COUNT, WIDTH, HEIGHT, BATCH, ROUNDS = 500, 480, 360, 64, 7


def picture(seed: int) -> Image.Image:
    """Returns a synthetic image that compresses about as well as a photograph."""
    rng = np.random.default_rng(seed)
    total = np.full((HEIGHT, WIDTH, 3), 128.0, np.float32)
    for rows in (6, 24, 90, 360):
        waves = rng.normal(scale=40 * (6 / rows) ** 0.35, size=(3, rows, rows * WIDTH // HEIGHT)).astype(np.float32)
        planes = [Image.fromarray(wave).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC) for wave in waves]
        total += np.stack([np.asarray(plane) for plane in planes], axis=2)
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def synthetic_set(root: Path) -> ImageSet:
    paths = [f"{number}.jpg" for number in range(COUNT)]
    for number, path in enumerate(paths):
        picture(number).save(root / path, quality=90)
    labels = np.arange(COUNT) // 5
    return ImageSet("synthetic", labels, [str(label) for label in range(COUNT // 5)], root=root, paths=paths)


def plain(path: Path, rng: np.random.Generator) -> Tensor:
    """Loads one image as a textbook loader does."""
    image = Image.open(path).convert("RGB").resize((256, 256), Image.Resampling.BILINEAR)
    left, top = rng.integers(0, 33, 2).tolist()
    image = image.crop((left, top, left + 224, top + 224))
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD))
    return tensor.sub(mean).div(std)


def plain_batches(images: ImageSet, sampler: PKSampler, batches: int) -> Iterable[Tensor]:
    assert images.root is not None and images.paths is not None
    rng = np.random.default_rng(0)
    for step in range(batches):
        yield torch.stack([plain(images.root / images.paths[index], rng) for index in sampler.batch(step)])


def rows() -> list[dict[str, object]]:
    """Returns one row per feed: images per second (median over the rounds) and the ratio to plain Pillow."""
    torch.set_num_threads(1)
    workers = default_workers()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "images").mkdir()
        images = synthetic_set(root / "images")
        sampler = PKSampler(images.labels, 16, 4, seed=0)
        stores = {
            each.mode: open_store(prepare(images, root / each.mode, each.resize, each.mode, quiet=True), images)
            for each in (PAPER, OFFICIAL)
        }

        def ahead(feed: Feed, workers: int | None = None) -> Callable[[int], Iterable[object]]:
            return lambda batches: Batches(feed, sampler, stop_step=batches, workers=workers)

        resident = ResidentFeed(stores["square"], PAPER, quiet=True)
        feeds: dict[str, tuple[int, Callable[[int], Iterable[object]]]] = {
            "plain Pillow, one process": (4, lambda batches: plain_batches(images, sampler, batches)),
            f"decode, {threads(workers)}": (6, ahead(DecodeFeed(images, PAPER))),
            f"store, {threads(workers)}": (40, ahead(StoreFeed(stores["square"], PAPER))),
            "store, 1 thread": (40, ahead(StoreFeed(stores["square"], PAPER), workers=1)),
            f"store, resized crops, {threads(workers)}": (40, ahead(StoreFeed(stores["shorter"], OFFICIAL))),
            f"resident in main memory, {threads(workers)}": (40, ahead(resident, workers=workers)),
        }
        if torch.cuda.is_available():
            feeds["resident on the GPU"] = (200, ahead(ResidentFeed(stores["square"], PAPER, device="cuda", quiet=True)))
            official = ResidentFeed(stores["shorter"], OFFICIAL, device="cuda", quiet=True)
            feeds["resident on the GPU, resized crops"] = (200, ahead(official))
        seconds = medians({name: partial(_exhaust, *feed) for name, feed in feeds.items()}, ROUNDS, warm_up=1)
    speeds = {name: feeds[name][0] * BATCH / seconds[name] for name in feeds}
    first = next(iter(speeds.values()))
    return [{"feed": name, "images per second": speed, "times plain": speed / first} for name, speed in speeds.items()]


def _exhaust(batches: int, feed: Callable[[int], Iterable[object]]) -> None:
    for _ in feed(batches):
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("feed", "images / s", "× plain Pillow", title=f"{COUNT} JPEGs of {WIDTH} × {HEIGHT}, batches of {BATCH}")
    for row in rows():
        table.add_row(str(row["feed"]), f"{row['images per second']:,.0f}", f"{row['times plain']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
