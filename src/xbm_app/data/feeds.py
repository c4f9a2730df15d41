"""Batches for the model from files, from a store or from device memory, with the same bits from each.

`DecodeFeed` opens files as they are needed, `StoreFeed` reads a memory-mapped store, `ResidentFeed` keeps all images on the
device and crops there. `Batches` runs a feed ahead of the training loop; `sweep` iterates over a feed once, for testing.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from xbm.errors import InputError
from xbm.kernels import has_kernels
from xbm_app.data.distortions import distort
from xbm_app.data.images import ImageSet
from xbm_app.data.parallel import default_workers, in_order
from xbm_app.data.store import Store
from xbm_app.data.transforms import (
    Augmentation,
    Windows,
    as_channels,
    centre_params,
    crop_params,
    cut,
    cut_resident,
    global_generators,
    longest_window,
    normalisation,
    resized,
    seeds_of,
    transformed,
)
from xbm_app.progress import track

Indices = np.ndarray | Tensor  # (B,) int64: positions in the set, which are the instance ids


class Sampler(Protocol):
    """Returns the indices of any batch, as the samplers in `xbm_app.data.samplers` do."""

    def batch(self, step: int) -> np.ndarray: ...


class Feed:
    """Images by index, ready for the model. Subclasses implement `view`, which returns the resized pixels.

    Attributes:
        labels: (N,) int64 on `device`.
        device: the device of the batches.
        workers: the default number of threads of `Batches` and `sweep`.
    """

    def __init__(self, labels: np.ndarray, augmentation: Augmentation, seed: int) -> None:
        self.labels = torch.from_numpy(np.asarray(labels, np.int64))
        self.augmentation, self.seed = augmentation, seed
        self.device, self.workers = torch.device("cpu"), default_workers()

    @cached_property
    def _norm(self) -> tuple[Tensor, Tensor]:
        offset, gain = (torch.from_numpy(each).to(self.device) for each in normalisation(self.augmentation))
        return offset, gain

    def __len__(self) -> int:
        return len(self.labels)

    def view(self, index: int) -> np.ndarray:
        """Returns the resized pixels of one image.  # (h, w, C) uint8"""
        raise NotImplementedError

    def train(self, indices: Indices, step: int | Tensor) -> Tensor:
        """Returns the augmented batch at `step`, a function of (seed, step, indices).  # (B, C, crop, crop) float32"""
        ids = self.ids(indices)
        views = None if self.augmentation.transform is None else self._transformed(indices, int(step), ids)
        return self._distorted(self._cut(indices, partial(crop_params, self.seed, step, ids), views), step, ids)

    def test(self, indices: Indices) -> Tensor:
        """Returns a batch without augmentation.  # (B, C, crop, crop) float32"""
        return self._cut(indices, centre_params)

    def ids(self, indices: Indices) -> Tensor:
        """Returns the indices as a tensor on the feed's device."""
        ids = indices if isinstance(indices, Tensor) else torch.from_numpy(np.asarray(indices, np.int64))
        return ids.to(self.device, non_blocking=True)

    @property
    def train_in_threads(self) -> bool:
        """Whether threads may call `train`: a transform of the user's own draws from generators that all threads share."""
        return self.augmentation.transform is None

    def _transformed(self, indices: Indices, step: int, ids: Tensor) -> list[np.ndarray]:
        how = self.augmentation
        assert how.transform is not None
        views = in_order((partial(self.view, index) for index in indices.tolist()), self.workers, ahead=2 * self.workers)
        with global_generators(), closing(views):
            results = [transformed(how.transform, view, seed) for view, seed in zip(views, seeds_of(self.seed, step, ids))]
        smallest = min(min(result.shape[:2]) for result in results)
        if smallest < how.crop and how.kind != "resized_crop":
            raise InputError(
                f"the transform returns images of {smallest} pixels, smaller than data.crop={how.crop}: enlarge them"
            )
        return [as_channels(result, how.channels) for result in results]

    def _distorted(self, images: Tensor, step: int | Tensor, ids: Tensor) -> Tensor:
        return distort(images, self.seed, step, ids, *self._norm) if self.augmentation.strong else images

    def _cut(
        self,
        indices: Indices,
        windows: Callable[[Tensor, Tensor, Augmentation], Windows],
        views: list[np.ndarray] | None = None,
    ) -> Tensor:
        views = views or [self.view(index) for index in indices.tolist()]
        heights, widths = (torch.tensor([view.shape[axis] for view in views]) for axis in (0, 1))
        return cut(views, windows(heights, widths, self.augmentation), self.augmentation)


class DecodeFeed(Feed):
    """Opens and resizes images as they are needed. It needs no preparation and is by far the slowest feed.

    Example:
        >>> pixels = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8)
        >>> images = ImageSet("two", np.array([0, 1]), ["a", "b"], pixels=pixels)
        >>> grey = Augmentation("shift", resize=8, crop=8, padding=1, flip=False, mean=(0.5,), std=(0.5,), channels=1)
        >>> DecodeFeed(images, grey, seed=0).train(np.array([1, 0, 1]), step=5).shape
        torch.Size([3, 1, 8, 8])
    """

    def __init__(self, images: ImageSet, augmentation: Augmentation, seed: int = 0) -> None:
        super().__init__(images.labels, augmentation, seed)
        self._images = images

    def view(self, index: int) -> np.ndarray:
        how = self.augmentation
        return as_channels(resized(self._images, how.resize, how.mode, index, how.interpolation), how.channels)


class StoreFeed(Feed):
    """Crops windows directly from a memory-mapped store."""

    def __init__(self, store: Store, augmentation: Augmentation, seed: int = 0) -> None:
        super().__init__(store.labels, augmentation, seed)
        if (store.resize, store.mode) != (augmentation.resize, augmentation.mode):
            raise InputError(
                f"{store.path} holds images resized to {store.resize} {store.mode}, the augmentation needs "
                f"{augmentation.resize} {augmentation.mode}: prepare another store"
            )
        if augmentation.interpolation != "bilinear":
            raise InputError(
                f"{store.path} holds images resized bilinearly: set data.interpolation=bilinear, or train without it"
            )
        self._store = store

    def view(self, index: int) -> np.ndarray:
        return as_channels(self._store.view(index), self.augmentation.channels)


class ResidentFeed(Feed):
    """Keeps all resized images on the device as bytes. A batch takes a few kernels, and nothing waits for the host.

    On a GPU, `indices` and `step` may be tensors on it, so that a CUDA graph can record a whole training step. On a CPU the
    images are in main memory.
    """

    def __init__(
        self,
        source: ImageSet | Store,
        augmentation: Augmentation,
        seed: int = 0,
        device: torch.device | str = "cpu",
        quiet: bool = False,
    ) -> None:
        super().__init__(source.labels, augmentation, seed)
        self.device, self.workers = torch.device(device), 0
        self.labels = self.labels.to(self.device)
        feed = DecodeFeed(source, augmentation) if isinstance(source, ImageSet) else StoreFeed(source, augmentation)
        workers = feed.workers if isinstance(source, ImageSet) and source.pixels is None else 0
        loaded = in_order((partial(feed.view, index) for index in range(len(feed))), workers, ahead=4 * workers)
        views = track(loaded, f"loading {len(feed)} images", total=len(feed), quiet=quiet)
        if isinstance(source, Store):
            shapes = torch.from_numpy(np.stack([source.heights, source.widths]))
        elif augmentation.mode == "square":
            shapes = torch.full((2, len(feed)), augmentation.resize)
        else:
            decoded = list(views)
            shapes = torch.tensor([view.shape[:2] for view in decoded]).reshape(-1, 2).T
            views = iter(decoded)

        ends = shapes.prod(dim=0).cumsum(0)
        starts = ends - shapes.prod(dim=0)
        self._table = _empty(int(ends[-1]) if len(feed) else 0, augmentation.channels, self.device)
        for view, start in zip(views, starts.tolist()):
            flat = torch.from_numpy(np.array(view).reshape(-1, augmentation.channels))
            self._table[start : start + len(flat)] = flat
        self._on_host = torch.stack([starts, *shapes])  # (3, N): first pixel, height, width
        self._on_device = self._on_host.to(self.device)

    def view(self, index: int) -> np.ndarray:
        start, height, width = self._on_host[:, index].tolist()
        flat = self._table[start : start + height * width].cpu().numpy()
        return flat.reshape(height, width, self.augmentation.channels)

    def train(self, indices: Indices, step: int | Tensor) -> Tensor:
        # In main memory, cropping all images at once is faster only for small images, which is where shifts are used.
        shifts = self.augmentation.kind == "shift" and self.augmentation.transform is None
        if self.device.type == "cpu" and not shifts:
            return super().train(indices, step)
        return self.train_on_device(indices, step)

    def test(self, indices: Indices) -> Tensor:
        if self.device.type == "cpu":
            return super().test(indices)
        return self._gather(torch.as_tensor(indices), centre_params, reach=0)

    def train_on_device(self, indices: Indices, step: int | Tensor) -> Tensor:
        """`train` with operations on the whole batch, on any device."""
        ids = self.ids(indices) if isinstance(step, Tensor) else torch.as_tensor(indices)
        windows = partial(crop_params, self.seed, step, ids)
        return self._distorted(self._gather(ids, windows, reach=longest_window(self.augmentation)), step, ids)

    def _gather(self, ids: Tensor, windows: Callable[[Tensor, Tensor, Augmentation], Windows], reach: int) -> Tensor:
        # If the indices are on the host, the windows are computed there too and copied as one small tensor.
        layout = self._on_device if ids.device == self._on_device.device else self._on_host
        starts, heights, widths = layout[:, ids]
        crops = torch.stack([starts, heights, widths, *windows(heights, widths, self.augmentation)])
        crops = crops.to(self.device, non_blocking=True)  # (8, B)
        if not reach and has_kernels(self.device):
            from xbm_app.data.cut_kernel import cut_windows

            return cut_windows(self._table, crops, self.augmentation.crop, self._norm)
        starts, heights, widths, *rest = crops
        return cut_resident(self._table, starts, heights, widths, Windows(*rest), self.augmentation.crop, self._norm, reach)


class FeatureFeed(Feed):
    """Delivers features of a frozen trunk where other feeds deliver images. Every view of an image is its center crop.

    Example:
        >>> feed = FeatureFeed(torch.randn(5, 7), np.array([0, 0, 1, 1, 1]), Augmentation())
        >>> feed.train(np.array([3, 3]), step=9).shape
        torch.Size([2, 7])
    """

    def __init__(self, features: Tensor, labels: np.ndarray, augmentation: Augmentation, seed: int = 0) -> None:
        super().__init__(labels, augmentation, seed)
        self.device, self.workers = features.device, 0
        self.labels, self._features = self.labels.to(features.device), features

    def train(self, indices: Indices, step: int | Tensor) -> Tensor:
        return self._features[self.ids(indices)]

    def test(self, indices: Indices) -> Tensor:
        return self._features[self.ids(indices)]


def _empty(pixels: int, channels: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if pixels * channels > free:
            raise InputError(
                f"the images need {pixels * channels / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB free: use a store"
            )
    return torch.empty((pixels, channels), dtype=torch.uint8, device=device)


class Batches:
    """Training batches from `start_step` on, made ahead of time in threads, in order.

    Yields `(step, images, labels, ids)`, independent of the number of workers. An exception in a worker, such as the
    `InputError` for a missing image, is raised unchanged at its batch. Leaving the loop stops the workers.

    Example:
        >>> from xbm_app.data.samplers import ShuffleSampler
        >>> images = ImageSet("four", np.array([0, 0, 1, 1]), ["a", "b"], pixels=np.zeros((4, 6, 6, 3), np.uint8))
        >>> feed = DecodeFeed(images, Augmentation(resize=6, crop=5))
        >>> for step, images, labels, ids in Batches(feed, ShuffleSampler(4, 2, seed=0), start_step=3, stop_step=5):
        ...     print(step, tuple(images.shape), labels.tolist() == [int(i) // 2 for i in ids])
        3 (2, 3, 5, 5) True
        4 (2, 3, 5, 5) True

    Args:
        stop_step: the first step that is not made; None continues forever.
        workers: threads (default: the feed's); 0 makes each batch when it is requested.
        device: the device of the batches (default: the feed's); copies overlap with the work of a GPU.
    """

    def __init__(
        self,
        feed: Feed,
        sampler: Sampler,
        start_step: int = 0,
        stop_step: int | None = None,
        workers: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._feed, self._sampler = feed, sampler
        self._steps = range(start_step, sys.maxsize if stop_step is None else stop_step)
        self._workers, self._device = workers, device

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        batches = ((self._sampler.batch(step), partial(self._feed.train, step=step)) for step in self._steps)
        workers = self._workers if self._feed.train_in_threads else 0
        for step, batch in zip(self._steps, _ahead(self._feed, batches, workers, self._device)):
            yield step, *batch


def sweep(
    feed: Feed,
    batch_size: int,
    workers: int | None = None,
    device: torch.device | str | None = None,
    first: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Iterates once over a feed, or from `first` to `stop`, in order and without augmentation: `(images, labels, ids)`.

    The last batch may be smaller.
    """
    stop = len(feed) if stop is None else stop
    starts = range(first, stop, batch_size)
    return _ahead(feed, ((np.arange(k, min(stop, k + batch_size)), feed.test) for k in starts), workers, device)


def _ahead(
    feed: Feed,
    batches: Iterable[tuple[np.ndarray, Callable[[np.ndarray], Tensor]]],
    workers: int | None,
    device: torch.device | str | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Makes batches, given as their indices and the function for their images, ahead in threads."""
    workers = feed.workers if workers is None else workers
    target = feed.device if device is None else torch.device(device)

    def make(indices: np.ndarray, images: Callable[[np.ndarray], Tensor]) -> list[Tensor]:
        ids = feed.ids(indices)
        batch = [images(indices), feed.labels[ids], ids]
        if target.type == "cuda":  # only copies from pinned memory run in parallel with the GPU's work
            batch = [each.pin_memory() if each.device.type == "cpu" else each for each in batch]
        return batch

    for batch in in_order((partial(make, *each) for each in batches), workers, ahead=workers + 1):
        images, labels, ids = (each.to(target, non_blocking=True) for each in batch)
        yield images, labels, ids
