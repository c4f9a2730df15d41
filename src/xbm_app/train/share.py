"""What the ranks share after each backward pass, so that their models stay the same."""

import torch
from torch import nn

from xbm.distributed import Ranks


@torch.no_grad()
def share_gradients(model: nn.Module, ranks: Ranks) -> None:
    """The mean of all gradients over the ranks, in one exchange.

    Plain, and not DistributedDataParallel: a run also embeds without gradient (the memory's fill, the ×n update, drift), and
    several backward passes may make one step; here there is one exchange a step, whatever came before it.
    """
    if ranks.world == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return
    mean = ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]), "gradients") / ranks.world
    for part, gradient in zip(mean.split([gradient.numel() for gradient in gradients]), gradients):
        gradient.copy_(part.view_as(gradient))
