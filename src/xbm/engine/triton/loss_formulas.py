# mypy: disable-error-code="no-untyped-def"
"""The lines in which one loss differs from another: what a pair adds to its side, and the loss from both sides.

The passes around them are the same for every loss. `pass_kernel` adds up the negatives, `finish_kernel` the positives, and
`row_gradient_kernel` weighs both once more. A negative enters a sum or a log-sum-exp. A sum of exponentials is measured from a
peak, so that none overflows.

What the hyper-parameters are called here (`plan.KERNELS` sets them):

    contrastive, triplet   margin
    multi-similarity       margin: ε, alpha, beta, base: λ
    margin                 margin: the floor of the negatives, beta: β + α, base: β − α
    SupCon, N-pairs        beta: 1/τ
    circle                 beta: γ, base: m
"""

import triton
import triton.language as tl

from xbm.engine.triton.primitives import (
    BALANCED,
    CIRCLE,
    INF,
    LIFTED_STRUCTURE,
    MARGIN,
    MEAN,
    MULTI_SIMILARITY,
    N_PAIRS,
    SUP_CON,
    log1p_exp_sum,
)

NEAREST = tl.constexpr(1e-4)  # that of `losses/margin.py`: a distance is kept this far from 0


@triton.jit
def softplus(x):
    return log1p_exp_sum(tl.exp(tl.minimum(x, 0.0)), tl.maximum(x, 0.0))


@triton.jit
def distance(sims):
    """d = √(2 − 2S), kept away from 0, and |∂d/∂S|."""
    square = 2.0 - 2.0 * sims
    d = tl.sqrt(tl.maximum(square, NEAREST * NEAREST))
    return d, tl.where(square > NEAREST * NEAREST, 1.0 / d, 0.0)


@triton.jit
def inverse_temperature(temperature, beta):
    """1/τ, read on the device if τ is learned."""
    return beta if temperature is None else 1.0 / tl.load(temperature)


# ---- what a negative adds


@triton.jit
def negative_logits(sims, beta, base, KIND: tl.constexpr):
    """The logits of the negatives, for a loss with a log-sum-exp over them."""
    if KIND == CIRCLE:
        return beta * tl.maximum(sims + base, 0.0) * (sims - base)
    else:
        return beta * (sims - base)


@triton.jit
def negative_slopes(exponentials, sims, base, KIND: tl.constexpr):
    """e^logit·|∂logit/∂S|, up to a factor that all pairs share and `combine_sides` multiplies."""
    if KIND == CIRCLE:
        return exponentials * tl.maximum(sims + base, 0.0)
    else:
        return exponentials


@triton.jit
def counted_negatives(valid, sims, base, KIND: tl.constexpr):
    """The valid negatives that have a gradient."""
    if KIND == CIRCLE:
        return valid & (sims > -base)
    else:
        return valid


# ---- what a positive adds


@triton.jit
def positive_exponent(hardest, negative_peak, negatives, beta, base, KIND: tl.constexpr):
    """From where the exponentials of the positives are measured; N-pairs: log Σ_N e^logit, with which each is compared."""
    peak = 0.0
    if KIND == LIFTED_STRUCTURE:
        peak = tl.where(hardest < INF, -hardest, 0.0)
    elif KIND == N_PAIRS:
        peak = negative_peak + tl.log(negatives)
    elif KIND == CIRCLE:
        peak = tl.where(hardest < INF, beta * tl.maximum(1.0 + base - hardest, 0.0) * (1.0 - base - hardest), 0.0)
    return peak


@triton.jit
def weigh_positives(sims, mask, ceiling, peak, alpha, beta, base, KIND: tl.constexpr):
    """Value and weight of some positives (for a log-sum-exp: its terms, measured from `peak`), and which are valid."""
    valid = mask
    if KIND == MULTI_SIMILARITY:
        valid = mask & (sims < ceiling)
        w = tl.where(valid, tl.exp(-alpha * (sims - base) - peak), 0.0)
        value = w
    elif KIND == MARGIN:
        d, steepness = distance(sims)
        valid = mask & (d > base)
        w = tl.where(valid, steepness, 0.0)
        value = tl.where(valid, d - base, 0.0)
    elif KIND == SUP_CON:
        w = tl.where(mask, 1.0, 0.0)
        value = tl.where(mask, beta * sims, 0.0)
    elif KIND == LIFTED_STRUCTURE:
        w = tl.where(mask, tl.exp(-sims - peak), 0.0)
        value = w
    elif KIND == N_PAIRS:
        against = peak - beta * sims
        w = tl.where(mask, 1.0 / (1.0 + tl.exp(-against)), 0.0)
        value = tl.where(mask, softplus(against), 0.0)
    elif KIND == CIRCLE:
        slope = tl.maximum(1.0 + base - sims, 0.0)
        valid = mask & (slope > 0)
        value = tl.where(mask, tl.exp(beta * slope * (1.0 - base - sims) - peak), 0.0)
        w = tl.where(mask, value * slope, 0.0)
    else:
        w = tl.where(valid, 1.0, 0.0)
        value = tl.where(valid, 1.0 - sims, 0.0)
    return value, w, valid


@triton.jit
def softmax_terms(sims, mask, peak, beta):
    """SupCon: the terms of the positives in the softmax over all pairs."""
    return tl.exp(tl.where(mask, beta * sims - peak, -INF))


# ---- the loss from both sides


@triton.jit
def side_weights(num_negatives, num_positives, REDUCTION: tl.constexpr):
    """The weights of one negative and one positive in a loss that adds its sides; "balanced" takes each side's Σ weight."""
    negative_weight = 1.0
    positive_weight = 1.0
    if REDUCTION == MEAN:
        negative_weight = 1.0 / tl.maximum(num_negatives, 1).to(tl.float32)
        positive_weight = 1.0 / tl.maximum(num_positives, 1).to(tl.float32)
    elif REDUCTION == BALANCED:
        ratio = tl.maximum(num_positives, 1).to(tl.float32) / tl.maximum(num_negatives, 1).to(tl.float32)
        negative_weight = tl.minimum(ratio, 1.0)
    return negative_weight, positive_weight


@triton.jit
def combine_sides(
    negatives, negative_peak, num_negatives, negative_total,  # Σ, from where it is measured, how many, Σ weight (margin)
    positives, positive_peak, num_positives, positive_total,  # likewise; Σ weight
    beta, KIND: tl.constexpr, REDUCTION: tl.constexpr,
):  # fmt: skip
    """The loss of an anchor, the coefficients of its negatives and positives, and whether its pairs count at all."""
    active = num_positives >= 0
    share = 1.0 / tl.maximum(num_positives, 1).to(tl.float32)
    if KIND == MARGIN:
        if REDUCTION == BALANCED:
            negative_weight, positive_weight = side_weights(negative_total, positive_total, REDUCTION)
        else:
            negative_weight, positive_weight = side_weights(num_negatives, num_positives, REDUCTION)
        loss = positive_weight * positives + negative_weight * negatives
    elif KIND == SUP_CON:
        active = num_positives > 0
        loss = negative_peak + tl.log(negatives) - share * positives
        negative_weight = beta / negatives
        positive_weight = beta * share
    elif KIND == N_PAIRS:
        active = (num_positives > 0) & (negatives > 0)
        loss = share * positives
        negative_weight = share * positive_total * beta / negatives
        positive_weight = beta * share
    else:
        total = positive_peak + tl.log(positives) + negative_peak + tl.log(negatives)
        active = (positives > 0) & (negatives > 0)
        pull = 1.0
        loss = total
        if KIND == LIFTED_STRUCTURE:
            active = active & (total > 0)
        else:
            loss = softplus(total)
            pull = beta / (1.0 + tl.exp(-total))
        negative_weight = pull / negatives
        positive_weight = pull / positives
    return loss, negative_weight, positive_weight, active
