"""What a report shows of a run: plain data, so that the page depends on nothing that trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

import numpy as np

from xbm.errors import InputError, unknown

if TYPE_CHECKING:
    from PIL import Image

Picture = Union["Image.Image", np.ndarray]  # a PIL image, or (H, W) or (H, W, 3) uint8

SERIES = ("loss", "valid_negatives_batch", "valid_negatives_memory", "drift_10", "drift_100", "drift_1000")
SEVERITIES = ("info", "warning", "error")


def _none() -> np.ndarray:
    return np.empty(0)


@dataclass(frozen=True, eq=False)
class Match:
    """One picture found for another.

    Attributes:
        correct: whether it is of the query's class; negatives never are.
    """

    picture: Picture
    similarity: float
    correct: bool = False


@dataclass(frozen=True, eq=False)
class Query:
    """A query and what the run retrieves for it, nearest first.

    Attributes:
        key: names the query image, and is the same in every run, so that runs can be set side by side.
    """

    key: str
    picture: Picture
    results: Sequence[Match]


@dataclass(frozen=True, eq=False)
class Mined:
    """An anchor of a training step with its valid negatives, from its batch and from the memory, most similar first."""

    anchor: Picture
    positive: Picture | None
    batch: Sequence[Match]
    memory: Sequence[Match]


@dataclass(frozen=True, eq=False)
class Doubtful:
    """A training image whose label is in doubt.

    Attributes:
        key: names the image.
        label: the class that it is said to be of.
        nearest: the class that it lies among.
        own: what is most like it in the first, and `other` in the second.
    """

    key: str
    picture: Picture
    label: str
    nearest: str
    own: Sequence[Match]
    other: Sequence[Match]


@dataclass(frozen=True, eq=False)
class Trace:
    """What a run measured while it trained. A series is as long as `step` (NaN: not measured there), or empty.

    Attributes:
        step: (T,) iteration of each entry.
        valid_negatives_batch: (T,) negatives with a non-zero gradient, per step, from the batch.
        valid_negatives_memory: (T,) the same from the memory.
        drift_10: (T,) mean ‖f(x; θ_t) − f(x; θ_{t−10})‖²; so are `drift_100` and `drift_1000`.
        evaluations: (step, recall@1 between 0 and 1).
    """

    step: np.ndarray = field(default_factory=_none)
    loss: np.ndarray = field(default_factory=_none)
    valid_negatives_batch: np.ndarray = field(default_factory=_none)
    valid_negatives_memory: np.ndarray = field(default_factory=_none)
    drift_10: np.ndarray = field(default_factory=_none)
    drift_100: np.ndarray = field(default_factory=_none)
    drift_1000: np.ndarray = field(default_factory=_none)
    evaluations: Sequence[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        for name in SERIES:
            length = len(getattr(self, name))
            if length not in (0, len(self.step)):
                raise InputError(f"trace has {len(self.step)} steps but {length} values of {name}: give one a step, or none")


@dataclass(frozen=True, eq=False)
class RunView:
    """One finished run, ready to be shown.

    Runs with the same `group` are seeds of one setting, and are averaged.

    Attributes:
        name: names the run, e.g. its folder.
        group: label of the setting, e.g. "contrastive, mean, with memory".
        loss: e.g. "contrastive". Groups of one loss with and without memory are compared.
        reduction: "mean" or "sum" over pairs, or "" where the loss leaves no choice.
        memory: whether it trained with a memory.
        seed: runs of one seed share data and first weights, and differences are taken seed by seed.
        recall: fractions by name: "recall@1", "recall@2", ..., "map@r". Empty when the run did not get that far.
        curve: recall@K for K = 1, 2, ..., K_max, fractions.
        seconds: wall-clock time of training.
        iterations: steps taken in that time.
        trace: what was measured on the way.
        queries: up to 24 queries with up to 8 results each are shown; of more, some from all over the list.
        chosen: a sentence that says how `queries` were chosen. The page counts nothing over them, because a choice by outcome
            would make any count come out as chosen.
        mined: up to 12 anchors are shown.
        doubtful: up to 12 images whose labels are in doubt are shown.
        notes: (severity, sentence) that the run said about itself; severity is "info", "warning" or "error".
        data: what was searched, as the end of "Recall on ...", e.g. "glyphs, 180 unseen classes, 2,880 images".
        config: the few settings a reader wants to see.
        command: the command line that made the run.
        versions: software by name.
    """

    name: str
    group: str
    loss: str
    memory: bool
    seed: int
    reduction: str = ""
    recall: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[float] = ()
    seconds: float = float("nan")
    iterations: int = 0
    trace: Trace = field(default_factory=Trace)
    queries: Sequence[Query] = ()
    chosen: str = ""
    mined: Sequence[Mined] = ()
    doubtful: Sequence[Doubtful] = ()
    notes: Sequence[tuple[str, str]] = ()
    data: str = ""
    config: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for severity, _ in self.notes:
            if severity not in SEVERITIES:
                raise unknown("severity of a note", severity, SEVERITIES)
