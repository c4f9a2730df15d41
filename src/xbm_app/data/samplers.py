"""The batch samplers. A batch is a pure function of (seed, step), so a resumed run continues exactly where it stopped.

Random numbers come from a counter-based generator (`scramble`) without state: NumPy and torch give the same bits on every
platform, and checkpoints need not store anything.
"""

from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar, Union

import numpy as np

from xbm.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Words = TypeVar("Words", np.ndarray, "Tensor")  # int64 with at least one dimension: NumPy warns if a scalar overflows


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
