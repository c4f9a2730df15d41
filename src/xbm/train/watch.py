"""A run that watches itself: it notices collapse, divergence and a memory that hurts, and says what to try."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

COLLAPSED_COSINE = 0.98
COLLAPSED_RANK = 2.0


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


@dataclass
class Watch:
    """Reads each line of metrics and answers with what a user should know; each thing is said once."""

    memory_start: int
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
                "try loss.reduction=mean, memory.batch_weight=1, a lower optim.lr, or a smaller memory.ratio",
            ))  # fmt: skip
        recall = row.get("recall@1", math.nan)
        if not math.isnan(recall):
            if step < self.memory_start:
                self.before_memory = recall
            elif recall < self.before_memory - 0.02:
                new.append((
                    "fall",
                    f"iteration {step}: R@1 fell from {100 * self.before_memory:.1f} to {100 * recall:.1f} since the memory "
                    "started: try loss.reduction=mean, memory.batch_weight=1, or a later memory.start",
                ))  # fmt: skip
        fresh = [(kind, text) for kind, text in new if kind not in self.said]
        self.said |= {kind for kind, _ in fresh}
        self.notes += [("warning", text) for _, text in fresh]
        return [text for _, text in fresh]

    def state_dict(self) -> dict[str, object]:
        return {"notes": [list(note) for note in self.notes], "before": self.before_memory, "said": sorted(self.said)}

    def load_state_dict(self, state: dict) -> None:
        self.notes = [(severity, text) for severity, text in state["notes"]]
        self.before_memory, self.said = state["before"], set(state["said"])
