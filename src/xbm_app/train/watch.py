"""A run that watches itself: it notices collapse, divergence, and a memory that hurts or cannot help, and says what to try."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

COLLAPSED_COSINE = 0.98
COLLAPSED_RANK = 2.0
OUTWEIGHED = 3.0  # valid negatives of the memory for one positive: summed, they cost R@1 (docs/robustness.md)
LOST = 1.0  # squared distance: an image is then no nearer to its old row than the margin, S = 0.5


def spread_of(anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Mean pairwise cosine of a batch (m, D) and its effective rank, e^entropy of the normalised spectrum. No host sync."""
    v = anchors.detach().float()
    m = len(v)
    gram = v @ v.T
    cosine = (gram.sum() - gram.diagonal().sum()) / max(1, m * (m - 1))
    spectrum = torch.linalg.eigvalsh(gram).clamp(min=0)
    share = spectrum / spectrum.sum().clamp(min=1e-12)
    rank = torch.exp(-(share * share.clamp(min=1e-12).log()).sum())
    return cosine, rank


def either(*choices: str) -> str:
    """
    >>> either("a"), either("a", "b"), either("a", "b", "c")
    ('a', 'a or b', 'a, b, or c')
    """
    return " or ".join(choices) if len(choices) < 3 else f"{', '.join(choices[:-1])}, or {choices[-1]}"


@dataclass
class Watch:
    """Reads each line of metrics and answers with what a user should know; each thing is said once.

    Attributes:
        summed: whether negatives count by their number, however few positives there are.
        age: how many steps old the memory's rows are on average once it is full.
        remedies: settings that hold a memory back and that the run does not have.
        smaller, larger: what to say where the memory could be smaller or larger.
        negatives, positives: whether the training set has pairs of these kinds at all.
    """

    memory_start: int
    summed: bool = False
    age: float = 0.0
    remedies: tuple[str, ...] = ()
    smaller: tuple[str, ...] = ()
    larger: tuple[str, ...] = ()
    negatives: bool = True
    positives: bool = True
    notes: list[tuple[str, str]] = field(default_factory=list)  # (severity, sentence), kept with the run
    before_memory: float = math.nan  # the last R@1 without memory
    said: set[str] = field(default_factory=set)

    def look(self, row: dict[str, float]) -> list[str]:
        """New warnings that a line of metrics gives rise to."""
        new: list[tuple[str, str]] = []
        step = int(row["step"])
        cosine, rank = row.get("mean_cosine", math.nan), row.get("effective_rank", math.nan)
        if cosine > COLLAPSED_COSINE or rank < COLLAPSED_RANK:
            new.append((
                "collapse",
                f"iteration {step}: the embeddings are collapsing (mean cosine {cosine:.3f}, effective rank {rank:.1f}): "
                f"try {either(*self.remedies, 'a lower optim.lr', *self.smaller)}",
            ))  # fmt: skip
        recall = row.get("recall@1", math.nan)
        if not math.isnan(recall):
            if step < self.memory_start:
                self.before_memory = recall
            elif recall < self.before_memory - 0.02:
                new.append((
                    "fall",
                    f"iteration {step}: R@1 fell from {100 * self.before_memory:.1f} to {100 * recall:.1f} since the memory "
                    f"started: try {either(*self.remedies, 'a later memory.start')}",
                ))  # fmt: skip
        new += self._of_memory(step, row)
        fresh = [(kind, text) for kind, text in new if kind not in self.said]
        self.said |= {kind for kind, _ in fresh}
        self.notes += [("warning", text) for _, text in fresh]
        return [text for _, text in fresh]

    def _of_memory(self, step: int, row: dict[str, float]) -> list[tuple[str, str]]:
        """Why the memory hurts, or cannot help."""
        negatives, positives = (row.get(f"valid_{side}_memory", math.nan) for side in ("negatives", "positives"))
        if math.isnan(negatives) or math.isnan(positives):
            return []
        new = []
        if not self.negatives:
            new.append(("one", "there is one training class, so nothing is a negative: give two or more to tell apart"))
        elif not self.positives:
            new.append((
                "alone",
                "no training class has two images, so there is no positive: nothing pulls, and the memory cannot help",
            ))  # fmt: skip
        elif negatives == 0:
            new.append((
                "idle",
                f"iteration {step}: no negative of the memory is near enough to any anchor to count, so it adds nothing: "
                "harder or more classes would give it something to find",
            ))  # fmt: skip
        elif positives == 0:
            new.append((
                "alone",
                f"iteration {step}: the memory held no positive for any anchor, so it can only push: "
                f"try {either(*self.larger, 'leaving out classes of a single image')}",
            ))  # fmt: skip
        elif self.summed and negatives > OUTWEIGHED * positives:
            new.append((
                "outweighed",
                f"iteration {step}: the memory's negatives outweigh its positives {negatives / positives:.0f} to 1, which "
                "can tear classes apart: try memory.reduction=balanced",
            ))  # fmt: skip
        for delta in (10, 100, 1000):
            drift = row.get(f"drift_{delta}", math.nan)
            if delta <= self.age and drift > LOST:
                new.append((
                    "lost",
                    f"iteration {step}: in {delta} steps an image moves by {drift:.2f} (squared distance), and the memory's "
                    f"rows are {self.age:.0f} steps old on average: until it moves less they do not tell where images are, and "
                    f"cannot help; try {either('a lower optim.lr', 'a later memory.start', *self.smaller)}",
                ))  # fmt: skip
        return new

    def state_dict(self) -> dict[str, object]:
        return {"notes": [list(note) for note in self.notes], "before": self.before_memory, "said": sorted(self.said)}

    def load_state_dict(self, state: dict) -> None:
        self.notes = [(severity, text) for severity, text in state["notes"]]
        self.before_memory, self.said = state["before"], set(state["said"])
