"""What an anchor's gradient is made of: the pull of positives and the push of negatives, from its batch and from the memory;
how old the rows are that push, and how much of the push is at images whose label is wrong."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from xbm.losses import PairLoss
from xbm_app.train import task
from xbm_app.train.job import Job


@torch.no_grad()
def gradient_shares(job: Job, true_labels: np.ndarray) -> dict[str, Any]:
    """Means over the anchors of one more batch: the norm of each part of the gradient, and its total weight.

    Args:
        true_labels: of the training images, which `data.noise` may have changed for training.
    """
    indices = job.sampler.batch(job.batches_per_step * job.config.optim.iterations)
    ids = torch.from_numpy(indices)
    anchors = job.model(job.feed.test(indices).to(job.device)).float().cpu()
    labels, truth = (torch.from_numpy(np.asarray(x)) for x in (job.dataset.train.labels, true_labels))
    in_batch, against = task.loss_of(job.config), task.loss_of(job.config, job.config.reduction)
    found: dict[str, Any] = {"batch": _parts(in_batch, anchors, labels[ids], ids, anchors, labels[ids], ids)[0]}
    if job.memory is not None and len(job.memory):
        rows, row_ids = job.memory.embeddings.float().cpu(), job.memory.ids.cpu()
        found["memory"], push = _parts(against, anchors, labels[ids], ids, rows, labels[row_ids], row_ids)
        ages = job.memory.ages.cpu()
        same = truth[ids][:, None] == truth[row_ids]
        valid = (push > 0).nonzero()[:, 1]
        found["age"] = {"rows": float(ages.median()), "valid negatives": float(ages[valid].median()) if len(valid) else None}
        found["false"] = _digits((push * same).sum() / push.sum()) if bool(push.sum() > 0) else None
    return found


def _parts(
    loss: PairLoss, anchors: Tensor, labels: Tensor, ids: Tensor, rows: Tensor, row_labels: Tensor, row_ids: Tensor
) -> tuple[dict[str, float], Tensor]:
    """Norms and weights of pull and push, and the weights of the negatives (m, M)."""
    same, other = labels[:, None] == row_labels, ids[:, None] != row_ids
    weights = loss.weights(anchors @ rows.T, same & other, ~same & other)
    pull, push = weights * same, weights * ~same
    return {
        "pull": _digits((pull @ rows).norm(dim=1).mean()), "push": _digits((push @ rows).norm(dim=1).mean()),
        "pull_weight": _digits(pull.sum(1).mean()), "push_weight": _digits(push.sum(1).mean()),
    }, push  # fmt: skip


def _digits(value: Tensor) -> float:
    return float(f"{float(value):.4g}")
