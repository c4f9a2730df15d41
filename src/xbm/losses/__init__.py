"""Pair-weighted losses, one a file. Each states its weights w_ij and its one-pass form."""

from xbm.engine.terms import LOSSES
from xbm.losses.circle import CircleLoss
from xbm.losses.contrastive import ContrastiveLoss
from xbm.losses.lifted_structure import LiftedStructureLoss
from xbm.losses.margin import MarginLoss
from xbm.losses.metric_learning import MetricLearningLoss
from xbm.losses.multi_similarity import MultiSimilarityLoss
from xbm.losses.n_pairs import NPairsLoss
from xbm.losses.pair import REDUCTIONS, PairLoss, PairStats
from xbm.losses.sup_con import SupConLoss
from xbm.losses.triplet import TripletLoss

__all__ = [
    "LOSSES",
    "REDUCTIONS",
    "CircleLoss",
    "ContrastiveLoss",
    "LiftedStructureLoss",
    "MarginLoss",
    "MetricLearningLoss",
    "MultiSimilarityLoss",
    "NPairsLoss",
    "PairLoss",
    "PairStats",
    "SupConLoss",
    "TripletLoss",
]
