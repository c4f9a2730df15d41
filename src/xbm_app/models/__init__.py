"""Embedding models: trunks with ImageNet weights, pooling, and a linear head onto the unit sphere."""

from xbm_app.models.embedding import POOLINGS, EmbeddingModel, build_model, freeze, freeze_batch_norm, parameter_groups
from xbm_app.models.trunks import TRUNKS

__all__ = ["POOLINGS", "TRUNKS", "EmbeddingModel", "build_model", "freeze", "freeze_batch_norm", "parameter_groups"]
