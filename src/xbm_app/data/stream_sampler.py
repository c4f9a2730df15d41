"""P × K batches from a stream: images are read in the order of their shards, and a bounded buffer holds their classes.

The exact `PKSampler` deals all images of an epoch at once, so a batch takes its images from anywhere. Here a buffer holds the
next images of the stream. An image waits there until K of its class have come, which then make a group; a batch is P groups of
different classes, drawn at random. When too few groups are complete, the images that have waited longest are used with
repetition, so nothing is read twice or left behind, and no class is held back.

The sampler knows the labels of the whole stream from the index of its shards, so it deals with numbers only. The bytes of an
image are read when its batch is made, close to where the stream is: nearly in order, and through the operating system's cache.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from xbm.errors import InputError
from xbm_app.data.samplers import counted, keys_of_epoch, share_of_rank, stream

TRIES = 4  # random draws per place of a batch, before the groups are searched in order


class StreamSampler:
    """Batches of P distinct classes × K images from a stream of shards. See the module.

    The stream starts over for each epoch, with the shards in another order. A group of fewer than K images repeats them.

    Example:
        >>> labels, shards = np.arange(40) // 5, np.arange(40) // 20
        >>> sampler = StreamSampler(labels, shards, classes_per_batch=3, images_per_class=2, seed=0, buffer=24)
        >>> sampler.batch(0).shape, len(set(labels[sampler.batch(1)]))
        ((6,), 3)

    Args:
        labels: (N,) of the images in the order of the stream.
        shards: (N,) the shard of each image; those of a shard are consecutive.
        buffer: the number of images that may wait, at least two batches.
        rank, world: as in `PKSampler`.
    """

    def __init__(
        self,
        labels: np.ndarray,
        shards: np.ndarray,
        classes_per_batch: int,
        images_per_class: int,
        seed: int,
        buffer: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        size = classes_per_batch * images_per_class
        if classes_per_batch < 1 or images_per_class < 1:
            raise InputError(f"a batch needs at least 1 class × 1 image, got {classes_per_batch} × {images_per_class}")
        if (classes := len(np.unique(labels))) < classes_per_batch:
            raise InputError(
                f"a batch needs {classes_per_batch} different classes but there are {classes}: use a smaller batch"
            )
        if buffer < 2 * size:
            raise InputError(f"batch.buffer must hold at least two batches, {2 * size} images, got {buffer}")
        self._labels = np.asarray(labels, np.int64).tolist()
        starts = np.flatnonzero(np.r_[True, np.diff(shards) != 0])
        self._spans = np.stack([starts, np.r_[starts[1:], len(labels)]], axis=1)  # (shards, 2): first image, one past the last
        self._P, self._K, self._seed, self._buffer = classes_per_batch, images_per_class, seed, min(buffer, len(labels))
        self._mine = share_of_rank(classes_per_batch, "classes a batch", rank, world)
        self.steps_per_epoch = -(-len(labels) // size)
        self._head, self._tail = _Stream(self), _Stream(self)  # where batches are made, and where the last state was taken

    def batch(self, step: int) -> np.ndarray:
        """Returns the P·K indices of batch `step`, or this rank's part of them, with the K of a class side by side.

        Batches are made in order. One that lies behind is made again from the last state, which takes as long as all since.
        """
        if counted(step) < self._head.step:
            state = self._tail.state() if self._tail.step <= step else None
            self._head = _Stream(self, state)
        while self._head.step < step:
            self._head.next_batch()
        return np.array(self._head.next_batch()[self._mine], np.int64).flatten()

    def state(self, step: int) -> dict[str, Tensor]:
        """Everything that decides the batches from `step` on, for a checkpoint. Batches beyond may have been made already."""
        if step < self._tail.step:
            self._tail = _Stream(self)
        while self._tail.step < step:
            self._tail.next_batch()
        return self._tail.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._head, self._tail = _Stream(self, state), _Stream(self, state)

    def order(self, epoch: int) -> np.ndarray:
        """(N,): the images in the order in which an epoch reads them."""
        spans = self._spans[keys_of_epoch(self._seed, epoch, len(self._spans), 4).argsort(kind="stable")]
        return np.concatenate([np.arange(first, stop) for first, stop in spans])


class _Stream:
    """A place in the stream, with the images that wait there.

    Attributes:
        waiting: the images of each class that have not made a group yet, by class, the longest wait first.
        groups: groups of K images of one class.
        held: the number of images in both.
    """

    def __init__(self, sampler: StreamSampler, state: dict[str, Tensor] | None = None) -> None:
        self._of = sampler
        self.step = self.epoch = self.place = self.held = 0
        self.waiting: dict[int, list[int]] = {}
        self.groups: list[list[int]] = []
        if state is not None:
            self.step, self.epoch, self.place = state["place"].tolist()
            for group in _unpacked(state["waiting"]):
                self.waiting[sampler._labels[group[0]]] = group
            self.groups = list(_unpacked(state["groups"]))
            self.held = sum(map(len, self.waiting.values())) + sum(map(len, self.groups))
        self._order = sampler.order(self.epoch).tolist()

    def state(self) -> dict[str, Tensor]:
        place = torch.tensor([self.step, self.epoch, self.place])
        return {"place": place, "waiting": _packed(self.waiting.values()), "groups": _packed(self.groups)}

    def next_batch(self) -> list[list[int]]:
        """Reads on until the buffer is full, and takes P groups of different classes out of it."""
        self._fill()
        sampler, groups = self._of, self.groups
        chosen: dict[int, list[int]] = {}
        draws = iter(stream(sampler._seed, self.step, np.arange(TRIES * sampler._P)).tolist())
        while len(chosen) < sampler._P and groups and (draw := next(draws, None)) is not None:
            k = (draw & 0x7FFFFFFFFFFFFFFF) % len(groups)
            if (label := sampler._labels[groups[k][0]]) not in chosen:
                chosen[label] = groups[k]
                groups[k] = groups[-1]
                groups.pop()
        if len(chosen) < sampler._P:
            self._complete(chosen)
        self.held -= sum(map(len, chosen.values()))
        self.step += 1
        K = sampler._K
        return [(group * K)[:K] for group in chosen.values()]

    def _fill(self) -> None:
        labels, K, waiting = self._of._labels, self._of._K, self.waiting
        while self.held < self._of._buffer:
            if self.place == len(self._order):
                self.epoch, self.place = self.epoch + 1, 0
                self._order = self._of.order(self.epoch).tolist()
            index = self._order[self.place]
            self.place += 1
            self.held += 1
            group = waiting.setdefault(labels[index], [])
            group.append(index)
            if len(group) == K:
                self.groups.append(waiting.pop(labels[index]))

    def _complete(self, chosen: dict[int, list[int]]) -> None:
        """Fills up a batch for which chance has found too few classes: with groups in order, then with images that wait."""
        labels, P = self._of._labels, self._of._P
        rest = []
        for group in self.groups:
            if len(chosen) < P and labels[group[0]] not in chosen:
                chosen[labels[group[0]]] = group
            else:
                rest.append(group)
        self.groups = rest
        for label in [label for label in self.waiting if label not in chosen][: P - len(chosen)]:
            chosen[label] = self.waiting.pop(label)
        if len(chosen) < P:
            raise InputError(
                f"{self._of._buffer} images in a row are of only {len(chosen)} classes, and a batch needs {P}: increase "
                "batch.buffer, or write the shards in random order"
            )


def _packed(groups: Iterable[list[int]]) -> Tensor:
    """Lists of numbers as one tensor: each after its length."""
    return torch.tensor([number for group in groups for number in (len(group), *group)], dtype=torch.int64)


def _unpacked(packed: Tensor) -> Iterator[list[int]]:
    numbers, place = packed.tolist(), 0
    while place < len(numbers):
        stop = place + 1 + numbers[place]
        yield numbers[place + 1 : stop]
        place = stop
