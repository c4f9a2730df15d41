"""What the ranks share after each backward pass, so that their models stay the same."""

import torch
from torch import Tensor, nn

from xbm.distributed import Ranks


@torch.no_grad()
def share_gradients(model: nn.Module, ranks: Ranks) -> None:
    """The mean over the ranks of all gradients, and of the batch-norm statistics, in one exchange.

    Plain, and not DistributedDataParallel: a run also embeds without gradient (the memory's fill, the ×n update, drift), and
    several backward passes may make one step; here there is one exchange a step, whatever came before it.
    """
    if ranks.world == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    statistics = [b for b in model.buffers() if b.is_floating_point()]
    for some, why in ((gradients, "gradients"), (statistics, "statistics")):
        if some:
            mean = ranks.sum(torch.cat([x.flatten() for x in some]), why) / ranks.world
            _spread(mean, some)


def _spread(flat: Tensor, targets: list[Tensor]) -> None:
    for part, target in zip(flat.split([t.numel() for t in targets]), targets):
        target.copy_(part.view_as(target))
