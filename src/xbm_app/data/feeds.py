"""Three ways from a set of images to batches for the model, with the same bits from each.

`DecodeFeed` opens files as they are needed, `StoreFeed` reads a memory-mapped store, `ResidentFeed` keeps every image on the
device and cuts there. `Batches` runs a feed ahead of the training loop; `sweep` goes through a feed once, for testing.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from xbm.errors import InputError
from xbm.kernels import has_kernels
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
    longest_window,
    normalisation,
    resized,
)
from xbm_app.progress import track

Indices = np.ndarray | Tensor  # (B,) int64: positions in the set, which are the instance ids


class Sampler(Protocol):
    """What `Batches` asks for: the indices of any batch."""

    def batch(self, step: int) -> np.ndarray: ...


class Feed:
    """Images by index, ready for the model. Subclasses say where the resized pixels come from.

    Attributes:
        labels: (N,) int64 on `device`.
        device: where batches are delivered.
        workers: how many threads `Batches` and `sweep` use unless told otherwise.
    """

    def __init__(self, labels: np.ndarray, augmentation: Augmentation, seed: int) -> None:
        self.labels = torch.from_numpy(np.asarray(labels, np.int64))
        self.augmentation, self.seed = augmentation, seed
        self.device, self.workers = torch.device("cpu"), default_workers()

    def __len__(self) -> int:
        return len(self.labels)

    def view(self, index: int) -> np.ndarray:
        """The resized pixels of one image.  # (h, w, C) uint8"""
        raise NotImplementedError

    def train(self, indices: Indices, step: int | Tensor) -> Tensor:
        """A batch as the model sees it at `step`: a function of (seed, step, indices).  # (B, C, crop, crop) float32"""
        return self._cut(indices, partial(crop_params, self.seed, step, self.ids(indices)))

    def test(self, indices: Indices) -> Tensor:
        """A batch without augmentation.  # (B, C, crop, crop) float32"""
        return self._cut(indices, centre_params)

    def ids(self, indices: Indices) -> Tensor:
        """The indices as a tensor on the feed's device."""
        ids = indices if isinstance(indices, Tensor) else torch.from_numpy(np.asarray(indices, np.int64))
        return ids.to(self.device, non_blocking=True)

    def _cut(self, indices: Indices, windows: Callable[[Tensor, Tensor, Augmentation], Windows]) -> Tensor:
        views = [self.view(index) for index in indices.tolist()]
        heights, widths = (torch.tensor([view.shape[axis] for view in views]) for axis in (0, 1))
        return cut(views, windows(heights, widths, self.augmentation), self.augmentation)


class DecodeFeed(Feed):
    """Opens and resizes images as they are needed: no preparation, the slowest by far.

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
        pixels = resized(self._images, self.augmentation.resize, self.augmentation.mode, index)
        return as_channels(pixels, self.augmentation.channels)


class StoreFeed(Feed):
    """Cuts windows straight out of a memory-mapped store."""

    def __init__(self, store: Store, augmentation: Augmentation, seed: int = 0) -> None:
        super().__init__(store.labels, augmentation, seed)
        if (store.resize, store.mode) != (augmentation.resize, augmentation.mode):
            raise InputError(
                f"{store.path} holds images resized to {store.resize} {store.mode}, the augmentation needs "
                f"{augmentation.resize} {augmentation.mode}: prepare another store"
            )
        self._store = store

    def view(self, index: int) -> np.ndarray:
        return as_channels(self._store.view(index), self.augmentation.channels)


class ResidentFeed(Feed):
    """Holds all resized images on the device as bytes; a batch is a few kernels there, and nothing waits for the host.

    On a GPU, `indices` and `step` may be tensors on it, so that a whole step fits in a CUDA graph. On a CPU the images lie in
    main memory.
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
        offset, gain = (torch.from_numpy(each).to(self.device) for each in normalisation(augmentation))
        self._norm = (offset, gain)

    def view(self, index: int) -> np.ndarray:
        start, height, width = self._on_host[:, index].tolist()
        flat = self._table[start : start + height * width].cpu().numpy()
        return flat.reshape(height, width, self.augmentation.channels)

    def train(self, indices: Indices, step: int | Tensor) -> Tensor:
        # In main memory only small pictures, which are what shifts are for, are faster cut all at once than one by one.
        if self.device.type == "cpu" and self.augmentation.kind != "shift":
            return super().train(indices, step)
        return self.train_on_device(indices, step)

    def test(self, indices: Indices) -> Tensor:
        if self.device.type == "cpu":
            return super().test(indices)
        return self._gather(torch.as_tensor(indices), centre_params, reach=0)

    def train_on_device(self, indices: Indices, step: int | Tensor) -> Tensor:
        """`train` in kernels for the whole batch, whatever the device."""
        ids = self.ids(indices) if isinstance(step, Tensor) else torch.as_tensor(indices)
        return self._gather(ids, partial(crop_params, self.seed, step, ids), reach=longest_window(self.augmentation))

    def _gather(self, ids: Tensor, windows: Callable[[Tensor, Tensor, Augmentation], Windows], reach: int) -> Tensor:
        # Where the indices come from the host, the windows are found there too and travel as one small tensor.
        here = self._on_device if ids.device == self._on_device.device else self._on_host
        starts, heights, widths = here[:, ids]
        found = torch.stack([starts, heights, widths, *windows(heights, widths, self.augmentation)])
        found = found.to(self.device, non_blocking=True)
        if not reach and has_kernels(self.device):
            from xbm_app.data.cut_kernel import cut_windows

            return cut_windows(self._table, found, self.augmentation.crop, self._norm)
        starts, heights, widths, *rest = found
        return cut_resident(self._table, starts, heights, widths, Windows(*rest), self.augmentation.crop, self._norm, reach)


def _empty(pixels: int, channels: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if pixels * channels > free:
            raise InputError(
                f"the images take {pixels * channels / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB free: use a store"
            )
    return torch.empty((pixels, channels), dtype=torch.uint8, device=device)


class Batches:
    """Batches for training from `start_step` on, made ahead of time by threads, in exact order.

    Yields `(step, images, labels, ids)`: the same for any number of workers. An exception of a worker, such as the `InputError`
    for an image that has vanished, is raised as it is when its batch is due. Leaving the loop stops the workers.

    Example:
        >>> from xbm_app.data.samplers import ShuffleSampler
        >>> images = ImageSet("four", np.array([0, 0, 1, 1]), ["a", "b"], pixels=np.zeros((4, 6, 6, 3), np.uint8))
        >>> feed = DecodeFeed(images, Augmentation(resize=6, crop=5))
        >>> for step, images, labels, ids in Batches(feed, ShuffleSampler(4, 2, seed=0), start_step=3, stop_step=5):
        ...     print(step, tuple(images.shape), labels.tolist() == [int(i) // 2 for i in ids])
        3 (2, 3, 5, 5) True
        4 (2, 3, 5, 5) True

    Args:
        stop_step: the first step that is not made any more; None goes on for ever.
        workers: threads; None leaves it to the feed, 0 makes each batch when it is asked for.
        device: where the batches go; the copy overlaps with the work of a GPU.
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
        self._start, self._stop = start_step, stop_step
        self._workers = feed.workers if workers is None else workers
        self._device = feed.device if device is None else torch.device(device)

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        steps = count(self._start) if self._stop is None else range(self._start, self._stop)
        calls = (partial(self._make, step, self._sampler.batch(step)) for step in steps)
        for step, images, labels, ids in in_order(calls, self._workers, ahead=self._workers + 1):
            images, labels, ids = _move((images, labels, ids), self._device)
            yield step, images, labels, ids

    def _make(self, step: int, indices: np.ndarray) -> tuple[int, Tensor, Tensor, Tensor]:
        ids = self._feed.ids(indices)
        images, labels, ids = _pinned((self._feed.train(indices, step), self._feed.labels[ids], ids), self._device)
        return step, images, labels, ids


def sweep(
    feed: Feed,
    batch_size: int,
    workers: int | None = None,
    device: torch.device | str | None = None,
    first: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """All images of a feed (or those from `first` to `stop`) once, in order, without augmentation: `(images, labels, ids)`;
    the last batch may be short."""
    stop = len(feed) if stop is None else stop
    workers = feed.workers if workers is None else workers
    target = feed.device if device is None else torch.device(device)

    def make(start: int) -> tuple[Tensor, Tensor, Tensor]:
        indices = np.arange(start, min(stop, start + batch_size))
        ids = feed.ids(indices)
        images, labels, ids = _pinned((feed.test(indices), feed.labels[ids], ids), target)
        return images, labels, ids

    for made in in_order((partial(make, start) for start in range(first, stop, batch_size)), workers, ahead=workers + 1):
        images, labels, ids = _move(made, target)
        yield images, labels, ids


def _pinned(tensors: tuple[Tensor, ...], target: torch.device) -> tuple[Tensor, ...]:
    # Only from pinned memory does a copy run beside the GPU's work.
    pin = target.type == "cuda"
    return tuple(each.pin_memory() if pin and each.device.type == "cpu" else each for each in tensors)


def _move(tensors: tuple[Tensor, ...], target: torch.device) -> tuple[Tensor, ...]:
    return tuple(each.to(target, non_blocking=True) for each in tensors)
