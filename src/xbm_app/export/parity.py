"""Whether an exported model is the model: the same images through both, the largest difference told."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xbm.errors import InputError
from xbm_app.data.feeds import DecodeFeed
from xbm_app.export.graph import windows
from xbm_app.train.dataset import read_run
from xbm_app.train.load import Embedder

IMAGES = 100
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Sample:
    """Images to compare on.

    Attributes:
        source: what they are, in words.
        pixels: (N, C, crop, crop) uint8, as the exported model takes them.
        wanted: (N, D), what the run makes of them.
    """

    source: str
    pixels: np.ndarray
    wanted: np.ndarray


def sample(embedder: Embedder, run: Path) -> Sample:
    """Test images of the run, from all over the set; random pixels where its data is not at hand."""
    side, channels = embedder.augmentation.resize, embedder.augmentation.channels
    try:
        folder = run if run.is_dir() else run.parents[1]
        images = read_run(embedder.config, folder).protocols[0].query
        some = np.unique(np.linspace(0, len(images) - 1, IMAGES).astype(int)).tolist()
        feed = DecodeFeed(images, embedder.augmentation)
        views, source = [feed.view(index) for index in some], f"{len(some)} test images of {images.name}"
    except (InputError, OSError):
        random = np.random.default_rng(0)
        views = list(random.integers(0, 256, (IMAGES, side, side, channels), dtype=np.uint8))
        source = f"{IMAGES} images of random pixels (the data of the run is not at hand)"
    return Sample(source, windows(embedder, views), embedder.embed_views(views).numpy())


def largest_difference(run: Callable[[np.ndarray], np.ndarray], on: Sample) -> float:
    """Between any number of any embedding and the run's own; in uneven batches, since any batch must do."""
    found = [run(part) for part in np.split(on.pixels, [1, 8, min(45, len(on.pixels))]) if len(part)]
    return float(np.abs(np.concatenate(found) - on.wanted).max())
