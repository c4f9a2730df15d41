"""A slow copy of a model, whose embeddings drift less than those of the model that is trained (MoCo, arXiv 1911.05722)."""

import copy
from collections import defaultdict
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from xbm.errors import InputError

__all__ = ["MomentumEncoder"]


class MomentumEncoder(nn.Module):
    """Holds a slow copy of a model, to embed what goes into a memory: after each step, p_slow ← m·p_slow + (1 − m)·p.

    Call it like the model; no gradient is computed. Call `update()` after each step of the optimizer.

    - **Modes.** `train()` and `eval()` set the mode of the copy, independently of the model; at first it has the model's. In
      train mode, batch normalization uses the statistics of the batch of keys, as in MoCo.
    - **Buffers** are copied from the model unchanged, including the running statistics of batch normalization. Exceptions are
      those that only one of the two has, or that differ in shape, such as caches.
    - **Half precision.** In bfloat16 or float16, most updates would be rounded away. Such parameters are updated in float32
      copies, `masters`, and hold their rounded values.
    - **State.** `state_dict()` contains the copy but not the model; a new object that loads it continues exactly. The momentum
      is not part of it. If you load other weights into the model, set `momentum = 0` for one `update()`.
    - **Wrappers.** The model may be wrapped in DistributedDataParallel or torch.compile, before or after; the copy is not.
      Move the MomentumEncoder to the device of the model.
    - **Copies.** `copy.deepcopy` and pickle include the model. If a container has both, they stay connected.

    Args:
        model: the model that is trained.
        momentum: m, 0 ≤ m < 1. May be assigned at any time, as by a schedule.

    Attributes:
        encoder: the slow copy. Its parameters require no gradient.
        model: the model that `update` follows, without its wrappers.

    Raises:
        InputError: if the momentum is out of range, or if the model has parameters without a shape yet.

    Example:
        >>> from xbm import ContrastiveLoss, CrossBatchMemory
        >>> model = nn.Linear(6, 4)
        >>> keys = MomentumEncoder(model, momentum=0.99)
        >>> memory, loss_fn = CrossBatchMemory(size=100, dim=4), ContrastiveLoss()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for step in range(3):
        ...     images, labels, ids = torch.randn(8, 6), torch.arange(8) // 2, torch.arange(8) + 8 * step
        ...     memory.enqueue(nn.functional.normalize(keys(images)), labels, ids)
        ...     loss = loss_fn(nn.functional.normalize(model(images)), labels, memory, ids=ids)
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     keys.update()
        >>> len(memory), list(keys.state_dict())
        (24, ['encoder.weight', 'encoder.bias'])
    """

    encoder: nn.Module
    masters: nn.Module  # the float32 values of half-precision parameters, as buffers; see `_key` for their names
    _momentum: float

    def __init__(self, model: nn.Module, momentum: float = 0.999) -> None:
        super().__init__()
        self.momentum = momentum
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        model = _unwrapped(model)
        if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
            raise InputError("the model has parameters without a shape yet: run one batch through it first")
        self._model = (model,)  # in a tuple: a module that is an attribute would be registered, saved and moved twice
        self.encoder = copy.deepcopy(model).requires_grad_(False)
        self.training = model.training
        self._keep_masters({})

    @property
    def model(self) -> nn.Module:
        return self._model[0]

    @property
    def momentum(self) -> float:
        return self._momentum

    @momentum.setter
    def momentum(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < 1:
            raise InputError(f"momentum must satisfy 0 ≤ m < 1, got {value!r}")
        self._momentum = float(value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the slow copy returns, without a graph."""
        with torch.no_grad():
            return self.encoder(*args, **kwargs)

    @torch.no_grad()
    def update(self) -> None:
        """Moves the slow copy towards the model by a share of 1 − m, and copies the model's buffers.

        Raises:
            InputError: if the model has other parameters than at construction, or is on another device than the copy.
        """
        slow, live = dict(self.encoder.named_parameters()), dict(self.model.named_parameters())
        masters = dict(self.masters.named_buffers())
        if slow.keys() != live.keys() or any(slow[name].shape != live[name].shape for name in slow):
            raise InputError("the model's parameters are not those of its slow copy any more: create a new MomentumEncoder")
        groups: defaultdict[tuple, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for name, parameter in slow.items():
            if parameter.device != live[name].device:
                raise InputError(
                    f"the model is on {live[name].device}, its slow copy on {parameter.device}: move the MomentumEncoder with "
                    f".to({str(live[name].device)!r})"
                )
            target = masters.get(_key(name), parameter)
            targets, sources = groups[target.device, target.dtype]
            targets.append(target)
            sources.append(live[name].to(target.dtype))
        for (_, dtype), (targets, sources) in groups.items():
            if dtype.is_floating_point or dtype.is_complex:
                torch._foreach_lerp_(targets, sources, 1 - self.momentum)
            else:
                torch._foreach_copy_(targets, sources)
        for name, parameter in slow.items():
            if _key(name) in masters:
                parameter.copy_(masters[_key(name)])
        buffers = dict(self.model.named_buffers())
        for name, buffer in self.encoder.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])

    def _apply(self, fn: Callable, recurse: bool = True) -> "MomentumEncoder":
        before = dict(self.masters.named_buffers())  # .half() must not round them
        super()._apply(fn, recurse)
        self._keep_masters(before)
        return self

    @torch.no_grad()
    def _keep_masters(self, before: dict[str, Tensor]) -> None:
        """Gives every half-precision parameter its float32 values, and every other one those that it had as a master."""
        self.masters = nn.Module()
        for name, parameter in self.encoder.named_parameters():
            master = before.get(_key(name))
            if parameter.is_floating_point() and parameter.dtype.itemsize < 4:
                values = parameter if master is None else master
                self.masters.register_buffer(_key(name), values.to(parameter.device, torch.float32))
            elif master is not None:
                parameter.copy_(master)

    def extra_repr(self) -> str:
        return f"momentum={self.momentum}"


def _key(name: str) -> str:
    """The name of a parameter's master: a buffer's name has no dots."""
    return name.replace(".", "/")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile, in any order."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
