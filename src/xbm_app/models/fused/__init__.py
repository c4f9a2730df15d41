"""Batch normalisation with its activation, and max-pooling, as one Triton op each: what bounds a training step on a GPU
beside the convolutions is memory traffic, and these read and write less. `fuse` puts them into a model.
"""

from xbm_app.models.fused.fuse import fuse

__all__ = ["fuse"]
