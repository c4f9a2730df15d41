"""How anchors are compared with rows: `pairing` says which pairs count, `streaming`, `triton` and `dense` compute the loss.

Here is a loss call as one node of a graph that torch.compile makes, whichever of the one-pass engines computes it.
"""

import itertools
from collections.abc import Sequence
from importlib import import_module
from typing import Any, List  # noqa: UP035
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from xbm.engine.pairing import Pairing
from xbm.engine.terms import Loss
from xbm.errors import InputError

_handles = itertools.count()
_losses: WeakValueDictionary[int, Loss] = WeakValueDictionary()


def new_handle(loss: Loss) -> int:
    """A number under which compiled graphs find the loss, for as long as it lives."""
    handle = next(_handles)
    _losses[handle] = loss
    return handle


def scaled(gradient: Tensor, upstream: Tensor) -> Tensor:
    """A gradient times the upstream gradient, which may be a loss scale that float16 cannot represent."""
    if gradient.dtype == torch.float16:
        return (gradient.float() * upstream).to(gradient.dtype)
    return gradient * upstream


def temperature_gradient(anchors: Tensor, gradient: Tensor, both_roles: bool) -> Tensor:
    """The gradient in log τ of a loss that depends on S/τ only: −Σ_ij S_ij ∂L/∂S_ij = −Σ_i ⟨v_i, ∂L/∂v_i⟩.

    Args:
        both_roles: whether the gradient is that of the anchors as rows too, which makes it count twice.
    """
    wide = torch.promote_types(anchors.dtype, torch.float32)
    # an unsound anchor has no gradient, but may be NaN
    products = torch.where(gradient != 0, gradient.to(wide) * anchors.detach().to(wide), 0)
    return products.sum() * (-0.5 if both_roles else -1.0)


def one_pass_node(
    loss: Loss,
    leaves: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    p: Pairing,
    kernels: bool,
    wanted: Sequence[bool],
    stats: bool,
) -> list[Tensor]:
    """Loss, four gradients, five statistics and the number of unsound anchors, as one node of a compiled graph.

    Args:
        leaves: anchors, rows (None if they are the anchors and have no gradient of their own), references and log τ.
        wanted: which of their gradients are needed.
    """
    pointer, latest = p.latest or (None, None)
    return one_pass(
        *leaves, p.row_labels, p.stamps, p.labels, p.sound, p.ids, p.row_ids, p.own, pointer, latest, p.in_batch,
        loss.handle, kernels, list(wanted), stats,
    )  # fmt: skip


@torch.library.custom_op("xbm::one_pass", mutates_args=())
def one_pass(
    anchors: Tensor,
    rows: Tensor | None,
    references: Tensor | None,
    log_temperature: Tensor | None,
    row_labels: Tensor,
    stamps: Tensor,
    labels: Tensor,
    sound: Tensor | None,
    ids: Tensor | None,
    row_ids: Tensor | None,
    own: Tensor | None,
    pointer: Tensor | None,
    latest: Tensor | None,
    in_batch: bool,
    loss: int,
    kernels: bool,
    wanted: List[bool],  # noqa: UP006 (torch 2.6 reads List and Sequence of `typing` only)
    stats: bool,
) -> List[Tensor]:  # noqa: UP006
    """A one-pass engine as an operator: its data-dependent shapes stay inside. What was not requested comes back empty.

    A graph takes no objects, so the loss is passed as its handle. It is looked up when the node runs, with the
    hyper-parameters that it has then.
    """
    engine = import_module("xbm.engine.triton" if kernels else "xbm.engine.streaming")
    newest = None if pointer is None or latest is None else (pointer, latest)
    bank, live = anchors.detach() if rows is None else rows.detach(), None if references is None else references.detach()
    pairing = Pairing(bank, row_labels, stamps, labels, sound, ids, row_ids, own, newest, in_batch, live)
    with torch.no_grad():
        result = engine.compare(
            _losses[loss], anchors.detach(), pairing, *wanted[:2], stats, reference_gradient=wanted[2]
        )  # fmt: skip
        of_temperature = temperature_gradient(anchors, result.gradient, rows is None and wanted[0]) if wanted[3] else None
    none = anchors.new_empty(0)

    def gradient(of: Tensor | None, leaf: Tensor | None) -> Tensor:
        return none.clone() if of is None or leaf is None else of.to(leaf.dtype)

    # a statistic may be a view of an input or of another output, but a graph node must return fresh tensors
    statistics = [x.clone() for x in result.statistics] if stats else [none.clone() for _ in range(5)]
    unsound = none.clone() if result.unsound is None or not stats else result.unsound
    return [
        result.loss,
        result.gradient.to(anchors.dtype).contiguous(),
        gradient(result.row_gradient, rows),
        gradient(result.reference_gradient, references),
        gradient(of_temperature, log_temperature),
        *statistics,
        unsound,
    ]


@one_pass.register_fake
def _(  # type: ignore[no-untyped-def]
    anchors, rows, references, log_temperature, row_labels, stamps, labels, sound, ids, row_ids, own, pointer, latest,
    in_batch, loss, kernels, wanted, stats,
):  # fmt: skip
    wide = torch.promote_types(anchors.dtype, torch.float32)
    m, none = anchors.shape[0], anchors.new_empty(0)
    statistics = [none.clone() for _ in range(5)]
    if stats:
        statistics = [labels.new_empty(m, dtype=torch.int64) for _ in range(2)]
        statistics += [anchors.new_empty(m, dtype=wide) for _ in range(3)]
    gradients = [
        torch.empty_like(leaf) if needed and leaf is not None else none.clone()
        for leaf, needed in zip((rows, references, log_temperature), wanted[1:])
    ]
    unsound = labels.new_empty(()) if kernels and stats else none.clone()
    return [anchors.new_empty((), dtype=wide), anchors.new_empty(anchors.shape), *gradients, *statistics, unsound]


def _setup(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[1:5])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise InputError('this engine has no second derivatives: build the loss with engine="reference"')
    gradients = zip(ctx.saved_tensors, ctx.needs_input_grad)
    return *(scaled(gradient, grads[0]) if needed else None for gradient, needed in gradients), *[None] * 14


one_pass.register_autograd(_backward, setup_context=_setup)
