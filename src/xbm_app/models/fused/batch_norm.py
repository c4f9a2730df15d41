"""Training-mode batch normalisation with its activation, channels-last, as one node of the autograd graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from xbm_app.models.fused.layout import pixel_stride

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": lambda y: F.relu(y, inplace=True),
    "relu6": lambda y: F.relu6(y, inplace=True),
}
LET_PASS: dict[str, Callable[[Tensor], Tensor]] = {  # where an output says that its gradient goes on
    "none": torch.ones_like,
    "relu": lambda y: y > 0,
    "relu6": lambda y: (y > 0) & (y < 6),
}
KNOWN = tuple(PLAIN)  # in the order in which the kernels count them


def batch_norm_act(
    x: Tensor,  # (N, C, H, W), channels-last
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,  # (), int64
    tickets: Tensor,  # int32 zeros, one a block of channels, and zeros again afterwards
    momentum: float,
    eps: float,
    activation: str,
    more: Tensor | None = None,  # like x
) -> Tensor:
    """activation(batch norm(x) + more), of x's type. The running statistics move and `batches` counts one more, as in torch."""
    settings = running_mean, running_var, batches, tickets, momentum, eps, activation
    return _BatchNormAct.apply(x, weight, bias, more, *settings)


class _BatchNormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, more: Tensor | None, running_mean: Tensor, running_var: Tensor,
        batches: Tensor, tickets: Tensor, momentum: float, eps: float, activation: str,
    ) -> Tensor:  # fmt: skip
        from xbm_app.models.fused.norm_forward import forward

        ctx.stride, act = pixel_stride(x), KNOWN.index(activation)
        y, stats = forward(x, ctx.stride, weight, bias, running_mean, running_var, batches, tickets, momentum, eps, act, more)
        ctx.save_for_backward(x, weight, bias, stats, None if more is None else y)
        ctx.tickets, ctx.eps, ctx.activation = tickets, eps, activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for: torch's own formula has one
            plain = F.batch_norm(x, None, None, weight, bias, training=True, eps=ctx.eps)
            if y is None:
                plain = PLAIN[ctx.activation](plain)
            else:
                dy = dy * LET_PASS[ctx.activation](y)
            wanted = [t for t, needed in zip((x, weight, bias), ctx.needs_input_grad) if needed]
            found = iter(torch.autograd.grad(plain, wanted, dy, create_graph=True) if wanted else ())
            return (
                *(next(found) if needed else None for needed in ctx.needs_input_grad[:3]),
                dy if y is not None else None,
                *(None,) * 7,
            )
        from xbm_app.models.fused.norm_backward import backward

        act, inputs = KNOWN.index(ctx.activation), ctx.needs_input_grad[0]
        return *backward(dy, x, ctx.stride, weight, bias, stats, ctx.tickets, act, inputs, y), *(None,) * 7
