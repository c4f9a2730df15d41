"""Lemma 1, pair by pair: how far off a gradient is when a negative's embedding is an old one, and the bound on it.

For one negative pair, L = v_i · v_j with v_j held constant, the gradient with respect to the weights is J_iᵀ v_j, where
J_i = ∂v_i/∂θ. With an old ṽ_j in its place it is off by J_iᵀ (v_j − ṽ_j), so

    ‖J_iᵀ (v_j − ṽ_j)‖² ≤ C_i · ε_j,    C_i = σ_max(J_i)²,    ε_j = ‖v_j − ṽ_j‖²

C_i belongs to the anchor and the weights alone; it is found by power iteration without a look at the errors.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

Weights = dict[str, Tensor]


def embedding_of(model: nn.Module, image: Tensor) -> tuple[Callable[[Weights], Tensor], Weights]:
    """v_i as a function of the weights, and the weights as they are. The model must be in eval mode."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def embed(at: Weights) -> Tensor:
        return functional_call(model, {**at, **buffers}, (image[None],))[0]  # (D,)

    return embed, weights


def largest_singular_value_squared(
    embed: Callable[[Weights], Tensor], weights: Weights, most: int = 100, tolerance: float = 1e-4, seed: int = 0
) -> float:
    """σ_max(∂embed/∂θ)² by power iteration on J Jᵀ, which is only D × D and never made.

    Every estimate ‖Jᵀu‖² with a unit u is a lower bound; it is returned when another round adds less than `tolerance` of it.
    """
    v, pull = vjp(embed, weights)  # type: ignore[misc]
    u = torch.randn(v.shape, generator=torch.Generator().manual_seed(seed), dtype=v.dtype).to(v.device)
    u = u / u.norm()
    found = 0.0
    for _ in range(most):
        (back,) = pull(u)
        estimate = float(sum(part.square().sum() for part in back.values()))
        _, forth = jvp(embed, (weights,), (back,))  # type: ignore[misc]  # J Jᵀ u
        length = forth.norm()
        if estimate - found <= tolerance * estimate or float(length) == 0:
            return max(estimate, found)
        found, u = estimate, forth / length
    return found


def gradient_errors(embed: Callable[[Weights], Tensor], weights: Weights, differences: Tensor) -> Tensor:
    """(n,): ‖J_iᵀ d‖² for each difference d = v_j − ṽ_j of `differences` (n, D)."""
    _, pull = vjp(embed, weights)  # type: ignore[misc]
    errors = [sum(part.square().sum() for part in pull(d)[0].values()) for d in differences]
    return torch.stack([torch.as_tensor(error) for error in errors])
