"""Pair-weighted losses, one per file. Each states its weights w_ij and its one-pass form."""

from xbm.engine.terms import Combined, Expand, PairStats, Side, Terms
from xbm.losses.circle import CircleLoss
from xbm.losses.contrastive import ContrastiveLoss
from xbm.losses.lifted_structure import LiftedStructureLoss
from xbm.losses.margin import MarginLoss
from xbm.losses.metric_learning import MetricLearningLoss
from xbm.losses.multi_similarity import MultiSimilarityLoss
from xbm.losses.n_pairs import NPairsLoss
from xbm.losses.pair import REDUCTIONS, PairLoss
from xbm.losses.sup_con import SupConLoss
from xbm.losses.triplet import TripletLoss

# The losses by the names that configs use.
LOSSES: dict[str, type[PairLoss]] = {
    loss.name: loss
    for loss in (
        CircleLoss, ContrastiveLoss, LiftedStructureLoss, MarginLoss, MultiSimilarityLoss, NPairsLoss, SupConLoss, TripletLoss
    )
}  # fmt: skip

__all__ = [
    "LOSSES",
    "REDUCTIONS",
    "CircleLoss",
    "Combined",
    "ContrastiveLoss",
    "Expand",
    "LiftedStructureLoss",
    "MarginLoss",
    "MetricLearningLoss",
    "MultiSimilarityLoss",
    "NPairsLoss",
    "PairLoss",
    "PairStats",
    "Side",
    "SupConLoss",
    "Terms",
    "TripletLoss",
]
