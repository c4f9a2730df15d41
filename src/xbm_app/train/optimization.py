"""How weights are updated: the optimizer and its parameter groups, the learning-rate schedule, gradients, averaged weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from xbm import cached_backward
from xbm.distributed import Ranks
from xbm.errors import InputError, unknown
from xbm_app.models import EmbeddingModel, parameter_groups
from xbm_app.train.config import Config, Optim

if TYPE_CHECKING:
    from xbm_app.train.state import RunState

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("step", "cosine", "linear", "plateau")
SGD_MOMENTUM = 0.9
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def optimizer_of(config: Config, model: EmbeddingModel, loss_fn: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer over all that is trained; the group of the head, whose rate is the one that is logged, is the last.

    `adam` decays all weights, as in the paper. `adamw` and `sgd` spare norms and biases, as is usual with them.
    """
    optim = config.optim
    for name, known in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
        if getattr(optim, name) not in known:
            raise unknown(f"optim.{name}", getattr(optim, name), known)
    groups = parameter_groups(model, optim.lr, config.model.trunk_lr, optim.layer_decay, decay_all=optim.name == "adam")
    if proxies := list(loss_fn.parameters()):
        groups.insert(0, {"name": "loss", "params": proxies, "lr": optim.lr * config.loss.lr_factor})
    common: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    optimizer: torch.optim.Optimizer
    if optim.name == "sgd":
        optimizer = torch.optim.SGD(groups, momentum=SGD_MOMENTUM, **common)
    else:
        optimizer = (torch.optim.Adam if optim.name == "adam" else torch.optim.AdamW)(groups, **common)
    prepare(optimizer, device)
    return optimizer


def prepare(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """On a GPU, fuses the optimizer and keeps its learning rates there, where recorded CUDA graphs read them."""
    on_gpu = device.type == "cuda"
    for group in optimizer.param_groups:
        group["fused"] = on_gpu
        if "capturable" in group:
            group["capturable"] = on_gpu
        group["lr"] = torch.tensor(float(group["lr"]), device=device) if on_gpu else float(group["lr"])
    for state in optimizer.state.values():
        if "step" in state:  # SGD counts no steps
            state["step"] = state["step"].to(device)


def changes_rate(optim: Optim, step: int) -> bool:
    """Whether the learning rate at `step` differs from the one before."""
    return step <= optim.warmup or optim.schedule in ("cosine", "linear") or step in optim.decay_at


def rate_factor(optim: Optim, step: int) -> float:
    """The learning rate at `step`, as a multiple of the config's.

    Example:
        >>> optim = Optim(iterations=110, warmup=10, schedule="cosine")
        >>> [round(rate_factor(optim, step), 2) for step in (0, 4, 10, 60, 109)]
        [0.1, 0.5, 1.0, 0.5, 0.0]
    """
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    done = (step - optim.warmup) / max(1, optim.iterations - optim.warmup)
    if optim.schedule == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * done)
    if optim.schedule == "linear":
        return 1 - done
    return 0.1 ** sum(step >= decay for decay in optim.decay_at)


def set_rates(optimizer: torch.optim.Optimizer, rates: list[float], factor: float) -> None:
    """Sets the rate of every group to its own times `factor`. Does not wait for the device."""
    for group, rate in zip(optimizer.param_groups, rates):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float) -> None:
    """Scales all gradients such that their common norm is at most `largest`. Does not wait for the device."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(trained, largest, error_if_nonfinite=False)


def precision_of(name: str, device: torch.device) -> torch.dtype:
    """The type in which a model is trained."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in PRECISIONS:
        raise unknown("optim.precision", name, ["auto", *PRECISIONS])
    return PRECISIONS[name]


class AveragedWeights:
    """An exponential moving average of the weights and batch-norm statistics of a model, which is evaluated and saved.

    The first averages are over fewer steps: (1 + t) / (10 + t), up to `decay`. What is not trained stays as it is, bit for bit.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise InputError(f"optim.ema must be at least 0 and less than 1, such as 0.999, got {decay}")
        self.decay = decay
        self._live = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
        self.values = {name: value.clone() for name, value in self._live.items()}
        self.updates = torch.zeros((), device=next(iter(self._live.values())).device)  # on the device: graphs count there

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the model's weights of now."""
        self.updates += 1
        weight = 1 - torch.clamp((1 + self.updates) / (10 + self.updates), max=self.decay)
        average = list(self.values.values())
        difference = torch._foreach_sub(list(self._live.values()), average)
        torch._foreach_mul_(difference, weight)
        torch._foreach_add_(average, difference)

    @torch.no_grad()
    def load_into_model(self) -> None:
        """Replaces the weights of the model by their average, for good."""
        torch._foreach_copy_(list(self._live.values()), list(self.values.values()))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model has the averaged weights within the block."""
        trained = {name: value.clone() for name, value in self._live.items()}
        self.load_into_model()
        try:
            yield
        finally:
            torch._foreach_copy_(list(self._live.values()), list(trained.values()))

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The entries of a checkpoint: `model` is the average, for everything that uses a trained model."""
        trained = model.state_dict()
        average = {name: self.values.get(name, value) for name, value in trained.items()}
        return {"model": average, "average": {"trained": trained, "updates": self.updates}}

    @torch.no_grad()
    def load_state_dict(self, model: nn.Module, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, in `model` too."""
        model.load_state_dict(state["average"]["trained"])
        for name, value in self.values.items():
            value.copy_(state["model"][name])
        self.updates.copy_(state["average"]["updates"])


def learn_in_chunks(run: "RunState", images: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Back-propagates the loss of a batch that is embedded `batch.chunk` images at a time; returns its anchors."""
    model, autocast, kept = run.model, run.autocast, []

    def embed(part: Tensor) -> Tensor:
        with autocast:
            return model(part)

    def loss_and_anchors(anchors: Tensor) -> Tensor:
        kept.append(anchors.detach())
        return loss_of(anchors)

    cached_backward(embed, images, loss_and_anchors, chunk=run.config.batch.chunk, scaler=run.scaler)
    return kept[0]


def update_weights(run: "RunState") -> None:
    """The step of the optimizer, and of a memory whose rows have gradients of their own."""
    memory, scaler = run.memory, run.scaler
    if run.ranks.world > 1:
        average_gradients(run.model, run.ranks)
    scaler.unscale_(run.optimizer)
    if scaler.is_enabled() and memory is not None and memory.rows.grad is not None:
        memory.rows.grad /= scaler.get_scale()
    if run.config.optim.clip:
        clip_gradients(run.optimizer, run.config.optim.clip)
    scaler.step(run.optimizer)
    scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    if run.average is not None:
        run.average.update()
    if run.keys is not None:
        run.keys.update()
    if memory is not None and memory.update == "backprop":
        memory.step()


@torch.no_grad()
def average_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Averages the gradients over the ranks, in one exchange per step.

    DistributedDataParallel would not do: a run also embeds without gradient (filling the memory, the ×n update, drift), and
    several backward passes may make one step.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        return
    mean = ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]), "gradients") / ranks.world
    for part, gradient in zip(mean.split([gradient.numel() for gradient in gradients]), gradients):
        gradient.copy_(part.view_as(gradient))
