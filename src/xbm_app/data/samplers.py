"""The batch samplers. A batch is a pure function of (seed, step), so a resumed run continues exactly where it stopped.

Random numbers come from a counter-based generator (`scramble`) without state: NumPy and torch give the same bits on every
platform, and checkpoints need not store anything. Only `StreamSampler` has a state: what waits in its buffer.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, Union

import numpy as np

from xbm.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Words = TypeVar("Words", np.ndarray, "Tensor")  # int64 with at least one dimension: NumPy warns if a scalar overflows
TRIES = 4  # random draws per place of a batch of `StreamSampler`, before the groups are searched in order


def signed(word: int) -> int:
    """Returns a 64-bit word as a signed number."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


GAMMA = signed(0x9E3779B97F4A7C15)
_FIRST = signed(0xBF58476D1CE4E5B9)
_SECOND = signed(0x94D049BB133111EB)


def scramble(words: Words) -> Words:
    """The splitmix64 step: a bijection of 64-bit words whose output looks random even for consecutive numbers.

    Example:
        >>> scramble(np.array([0, 1])).tolist()
        [-2152535657050944081, -7995527694508729151]
    """
    # The shift of a signed word repeats its sign; the mask makes it an unsigned shift.
    words = words + GAMMA
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _FIRST
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _SECOND
    return words ^ ((words >> 31) & ((1 << 33) - 1))


def stream(seed: int, step: Union[int, "Tensor"], ids: Words) -> Words:
    """Returns one random word per instance, a function of (seed, step, id); `scramble(word ^ k)` is its k-th draw.

    If `ids` is a tensor, `step` may be one too, on the same device, so that nothing waits for the host.
    """
    base = int(scramble(np.array([signed(seed)]))[0])
    return scramble(scramble(ids ^ base) ^ step)


def keys_of_epoch(seed: int, epoch: int, count: int, purpose: int) -> np.ndarray:
    # Augmentation uses the draws k < 64 of the same streams.
    return scramble(stream(seed, epoch, np.arange(count, dtype=np.int64)) ^ (64 + purpose))


def _shuffled(seed: int, epoch: int, count: int, purpose: int) -> np.ndarray:
    return np.argsort(keys_of_epoch(seed, epoch, count, purpose), kind="stable")


def share_of_rank(items: int, what: str, rank: int, world: int) -> slice:
    if not 0 <= rank < world:
        raise InputError(f"rank must be 0 to {world - 1} for {world} processes, got {rank}")
    if items < world:
        raise InputError(f"{items} {what} are too few for {world} processes: use larger batches or fewer processes")
    return slice(items * rank // world, items * (rank + 1) // world)


class PKSampler:
    """Batches of P distinct classes × K images that contain every image once per epoch.

    Each class is shuffled and divided into groups of K. If the last group of a class is short, it is filled from the start of
    the same shuffled order; images repeat within a group only if the class has fewer than K. The groups are shuffled and
    dealt into the fewest batches in which no class occurs twice. Free places go to extra groups of other classes, each class
    in turn. They add up to less than one batch per epoch, unless one class has more groups than the images fill batches: then
    the other classes are repeated beside it.

    With several processes, rank r takes the r-th contiguous part of a batch's groups. Concatenated in the order of the ranks,
    the parts are the batch of a single process.

    Example:
        >>> sampler = PKSampler(np.array([0, 0, 0, 1, 1, 2]), classes_per_batch=2, images_per_class=2, seed=0)
        >>> sampler.steps_per_epoch, sampler.batch(7).shape
        (2, (4,))
    """

    def __init__(
        self,
        labels: np.ndarray,
        classes_per_batch: int,
        images_per_class: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if classes_per_batch < 1 or images_per_class < 1:
            raise InputError(f"a batch needs at least 1 class × 1 image, got {classes_per_batch} × {images_per_class}")
        classes, self._class_of = np.unique(np.asarray(labels), return_inverse=True)
        if len(classes) < classes_per_batch:
            raise InputError(
                f"a batch needs {classes_per_batch} different classes but there are {len(classes)} to train on: use a "
                f"smaller batch (batch.size={len(classes) * images_per_class}), or more images per class (batch.per_class)"
            )
        self._sizes = np.bincount(self._class_of)
        self._groups = -(-self._sizes // images_per_class)
        self._P, self._K, self._seed = classes_per_batch, images_per_class, seed
        self._mine = share_of_rank(classes_per_batch, "classes a batch", rank, world)
        self.steps_per_epoch = _fewest_batches(self._groups, classes_per_batch)
        self._plan_of = lru_cache(maxsize=1)(self._plan)

    def batch(self, step: int) -> np.ndarray:
        """Returns the P·K indices of batch `step`, or this rank's part of them, with the K of a class side by side."""
        epoch, place = divmod(counted(step), self.steps_per_epoch)
        return self._plan_of(epoch)[place, self._mine].flatten()

    def _plan(self, epoch: int) -> np.ndarray:
        """Returns all batches of an epoch.  # (steps_per_epoch, P, K)"""
        deck = np.repeat(np.arange(len(self._groups)), self._groups)
        deck = deck[_shuffled(self._seed, epoch, len(deck), 0)]
        dealt = deal(self._groups, self._P, deck, _shuffled(self._seed, epoch, len(self._groups), 1))
        # Without this, the classes that had to be dealt, which come first, would always go to the same rank.
        places = keys_of_epoch(self._seed, epoch, dealt.size, 2).reshape(dealt.shape).argsort(axis=1, kind="stable")
        dealt = np.take_along_axis(dealt, places, axis=1)

        images = np.lexsort((keys_of_epoch(self._seed, epoch, len(self._class_of), 3), self._class_of))
        start = np.cumsum(self._sizes) - self._sizes
        turn = _occurrence(dealt.reshape(-1)).reshape(dealt.shape)
        within = (turn[..., None] * self._K + np.arange(self._K)) % self._sizes[dealt][..., None]
        return images[start[dealt][..., None] + within]


def _fewest_batches(groups: np.ndarray, per_batch: int) -> int:
    return max(-(-int(groups.sum()) // per_batch), int(groups.max()))


def deal(groups: np.ndarray, per_batch: int, deck: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """Deals a shuffled deck of groups, named by their classes, into the fewest batches with no class twice in a batch.

    Invariant: with L batches left, no class has more than L groups left, and all together at most P·L. A batch takes the mean
    number of groups left per batch, rounded up. This keeps the invariant, never exceeds the number of classes left, and has
    room for every class with exactly L groups left, which must be taken now. The rest comes from the deck; a group whose
    class is already in the batch waits for the next one.

    Args:
        groups: (C,) the number of groups of each class.
        per_batch: P ≤ C.
        deck: each class as often as it has groups, in random order.
        spare: the classes in random order, to fill up batches.

    Returns:
        (batches, P) classes.
    """
    left, total = groups.copy(), int(groups.sum())
    batches = _fewest_batches(groups, per_batch)
    cards, waiting, fill = iter(deck.tolist()), dict[int, int](), deque(spare.tolist())
    dealt = np.empty((batches, per_batch), np.int64)
    for number in range(batches):
        togo = batches - number
        quota = -(-total // togo)
        chosen = dict.fromkeys(np.flatnonzero(left == togo).tolist())
        for c in list(waiting):
            if len(chosen) == quota:
                break
            if c not in chosen and left[c]:
                chosen[c] = None
                waiting[c] -= 1
            if not (waiting[c] and left[c]):
                del waiting[c]
        while len(chosen) < quota:
            c = next(cards)
            if c in chosen:
                waiting[c] = waiting.get(c, 0) + 1
            elif left[c]:
                chosen[c] = None
        left[list(chosen)] -= 1
        total -= quota

        while len(chosen) < per_batch:
            chosen[fill[0]] = None
            fill.rotate(-1)
        dealt[number] = list(chosen)
    return dealt


def _occurrence(values: np.ndarray) -> np.ndarray:
    """Counts the earlier occurrences of each value.  # (n,)"""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    lengths = np.diff(np.r_[first, len(values)])
    before = np.empty(len(values), np.int64)
    before[order] = np.arange(len(values)) - np.repeat(first, lengths)
    return before


class ShuffleSampler:
    """Batches of images in random order, all once per epoch; the last batch is filled up with the epoch's first images.

    With several processes, rank r takes the r-th contiguous part of a batch, as in `PKSampler`.

    Example:
        >>> sampler = ShuffleSampler(size=7, batch_size=3, seed=0)
        >>> sorted(set(np.concatenate([sampler.batch(step) for step in range(sampler.steps_per_epoch)]).tolist()))
        [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(self, size: int, batch_size: int, seed: int, rank: int = 0, world: int = 1) -> None:
        if not 1 <= batch_size <= size:
            raise InputError(f"batch_size must be 1 to {size}, the number of images, got {batch_size}")
        self._size, self._batch_size = size, batch_size
        self._mine = share_of_rank(batch_size, "images a batch", rank, world)
        self.steps_per_epoch = -(-size // batch_size)
        self._order_of = lru_cache(maxsize=1)(lambda epoch: _shuffled(seed, epoch, size, 0))

    def batch(self, step: int) -> np.ndarray:
        """Returns the indices of batch `step`, or this rank's part of them."""
        epoch, place = divmod(counted(step), self.steps_per_epoch)
        return self._order_of(epoch)[(place * self._batch_size + np.arange(self._batch_size)[self._mine]) % self._size]


def counted(step: int) -> int:
    if step < 0:
        raise InputError(f"step must be at least 0, got {step}")
    return step


class StreamSampler:
    """P × K batches from a stream: images are read in the order of their shards, and a bounded buffer holds their classes.

    The exact `PKSampler` deals all images of an epoch at once, so a batch takes its images from anywhere. Here a buffer
    holds the next images of the stream. An image waits there until K of its class have come, which then make a group; a
    batch is P groups of different classes, drawn at random. When too few groups are complete, the images that have waited
    longest are used with repetition, so nothing is read twice or left behind, and no class is held back.

    The sampler knows the labels of the whole stream from the index of its shards, so it deals with numbers only. The bytes
    of an image are read when its batch is made, close to where the stream is: nearly in order, and through the operating
    system's cache.

    The stream starts over for each epoch, with the shards in another order. A group of fewer than K images repeats them.

    Example:
        >>> labels, shards = np.arange(40) // 5, np.arange(40) // 20
        >>> sampler = StreamSampler(labels, shards, classes_per_batch=3, images_per_class=2, seed=0, buffer=24)
        >>> sampler.batch(0).shape, len(set(labels[sampler.batch(1)]))
        ((6,), 3)

    Args:
        labels: (N,) of the images in the order of the stream.
        shards: (N,) the shard of each image; those of a shard are consecutive.
        buffer: the number of images that may wait, at least two batches; None: K for each class and sixteen batches, so
            that the groups never run out.
        rank, world: as in `PKSampler`.
    """

    def __init__(
        self,
        labels: np.ndarray,
        shards: np.ndarray,
        classes_per_batch: int,
        images_per_class: int,
        seed: int,
        buffer: int | None = None,
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
        buffer = classes * images_per_class + 16 * size if buffer is None else buffer
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

    def state(self, step: int) -> dict[str, "Tensor"]:
        """Everything that decides the batches from `step` on, for a checkpoint. Batches beyond may have been made already."""
        if step < self._tail.step:
            self._tail = _Stream(self)
        while self._tail.step < step:
            self._tail.next_batch()
        return self._tail.state()

    def load_state(self, state: dict[str, "Tensor"]) -> None:
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

    def __init__(self, sampler: StreamSampler, state: dict[str, "Tensor"] | None = None) -> None:
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

    def state(self) -> dict[str, "Tensor"]:
        import torch

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
        taken = []
        for k, group in enumerate(self.groups):
            if len(chosen) == P:
                break
            if labels[group[0]] not in chosen:
                chosen[labels[group[0]]] = group
                taken.append(k)
        for k in reversed(taken):
            self.groups[k] = self.groups[-1]
            self.groups.pop()
        longest = islice((label for label in self.waiting if label not in chosen), P - len(chosen))
        for label in list(longest):
            chosen[label] = self.waiting.pop(label)
        if len(chosen) < P:
            raise InputError(
                f"{self._of._buffer} images in a row are of only {len(chosen)} classes, and a batch needs {P}: increase "
                "batch.buffer, or write the shards in random order"
            )


def _packed(groups: Iterable[list[int]]) -> "Tensor":
    """Lists of numbers as one tensor: each after its length."""
    import torch

    return torch.tensor([number for group in groups for number in (len(group), *group)], dtype=torch.int64)


def _unpacked(packed: "Tensor") -> Iterator[list[int]]:
    numbers, place = packed.tolist(), 0
    while place < len(numbers):
        stop = place + 1 + numbers[place]
        yield numbers[place + 1 : stop]
        place = stop
