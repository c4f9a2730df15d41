"""Feature drift on fixed images: D(x, t; Δt) = ‖f(x; θ_t) − f(x; θ_{t−Δt})‖² (the paper's Eq. 2)."""

import torch
from torch import Tensor, nn

STEPS = (10, 100, 1000)


class Drift(nn.Module):
    """Measures how fast the embeddings of some fixed images move while a model is trained.

    Call it with the model once per iteration; it embeds the images in eval mode only when a measurement is due, and at the
    earlier iterations that the measurement needs. Its whole state is in buffers, so it resumes with the run.

    Args:
        images: (n, ...) a few dozen fixed inputs.
        dim: D of the embeddings.
        every: how often to measure; a multiple of 10.
        steps: the Δt.

    Attributes:
        phases: iterations modulo `every` at which the images are embedded; a call at any other iteration does nothing.

    Example:
        >>> model = torch.nn.Linear(4, 3)
        >>> drift = Drift(torch.randn(5, 4), dim=3, every=10, steps=(10,))
        >>> for t in range(11):
        ...     means = drift(t, model)
        >>> {step: float(mean) for step, mean in means.items()}  # a model that was not trained does not drift
        {10: 0.0}
    """

    images: Tensor
    past: Tensor  # (slots, n, D): embeddings of earlier iterations
    taken: Tensor  # (slots,): the iteration of each, -1 = none

    def __init__(self, images: Tensor, dim: int, every: int = 100, steps: tuple[int, ...] = STEPS) -> None:
        super().__init__()
        self.every, self.steps = every, steps
        self.phases = sorted({-step % every for step in steps} | {0})
        slots = len(self.phases) * (max(steps) // every + 1)
        self.register_buffer("images", images, persistent=False)
        self.register_buffer("past", torch.zeros(slots, len(images), dim, device=images.device))
        self.register_buffer("taken", torch.full((slots,), -1, dtype=torch.int64))  # stays on the host: it is bookkeeping

    @torch.no_grad()
    def embed(self, model: nn.Module) -> Tensor:
        """(n, D): the embeddings of the images by the model in eval mode."""
        was_training = model.training
        model.eval()
        embeddings = model(self.images).float()
        model.train(was_training)
        return embeddings

    @torch.no_grad()
    def forward(self, t: int, model: nn.Module) -> dict[int, Tensor]:
        """Returns the mean drift for every Δt that can be measured at iteration t, as device tensors; {} if none is due."""
        if t % self.every not in self.phases or len(self.images) == 0:
            return {}
        now, means = self.embed(model), {}
        if t % self.every == 0:
            for step in self.steps:
                slot = (self.taken == t - step).nonzero()
                if t >= step and len(slot):
                    means[step] = (now - self.past[int(slot[0])]).square().sum(1).mean()
        oldest = int(self.taken.argmin())
        self.past[oldest], self.taken[oldest] = now, t
        return means

    def _apply(self, fn, recurse: bool = True) -> "Drift":  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)
        self.taken = self.taken.cpu()
        return self
