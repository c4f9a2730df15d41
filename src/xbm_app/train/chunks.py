"""Batches that are embedded `batch.chunk` images at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from xbm import cached_backward
from xbm_app.train.state import RunState


def learn_in_chunks(run: RunState, images: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Back-propagates the loss of a batch; returns its anchors."""
    model, autocast, kept = run.model, run.autocast, []

    def embed(part: Tensor) -> Tensor:
        with autocast:
            return model(part)

    def loss_and_anchors(anchors: Tensor) -> Tensor:
        kept.append(anchors.detach())
        return loss_of(anchors)

    cached_backward(embed, images, loss_and_anchors, chunk=run.config.batch.chunk, scaler=run.scaler)
    return kept[0]


def keys_of(run: RunState, images: Tensor) -> Tensor:
    """(m, D): what the slow copy of the model makes of a batch."""
    assert run.keys is not None
    with run.autocast:
        return torch.cat([run.keys(part) for part in images.split(run.config.batch.chunk or len(images))])
