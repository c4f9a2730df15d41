"""The balanced contrastive loss with its constant as a variable: what happens if the push may outweigh the pull, or may not
even reach it. For study only; `ContrastiveLoss(reduction="balanced")` is this at 1."""

from typing import ClassVar

from xbm.losses import ContrastiveLoss

PUSHED = "contrastive_pushed"


class PushedContrastiveLoss(ContrastiveLoss):
    """L_i = Σ_P (1 − S) + c Σ_N [S − λ]₊ with c ≤ 1 so that the valid negatives weigh at most ρ times the positives.

    That is its reduction "balanced"; the others are as ever. On a GPU it is left to the streaming engine.

    Args:
        push: ρ.
    """

    name = PUSHED
    hyperparameters: ClassVar[tuple[str, ...]] = ("margin", "push")

    def __init__(self, margin: float = 0.5, push: float = 1.0, **shared: str) -> None:
        super().__init__(margin, **shared)
        self.push = push
