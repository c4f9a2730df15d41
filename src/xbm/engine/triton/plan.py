"""How a step is divided: tile sizes, grids, lists, and the constants that kernels are compiled for.

A plan depends on shapes, types and the loss's constants only, never on data, and is made once for each combination.

Budget of the pass over the bank for 512 columns of 16 bits, on a multiprocessor with 227 KB of shared memory and 64 Ki
registers: 64 anchors 64 KB + two tiles of 64 rows 128 KB + their weights 8 KB = 200 KB; the gradient, 64 × 512 float32, is
128 of the 255 registers of each of 256 threads. Fewer columns leave room for two programs on a multiprocessor.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from xbm.checks import tolerance
from xbm.engine.triton.primitives import (
    BALANCED,
    CIRCLE,
    CONTRASTIVE,
    CONTRASTIVE_ONE_PASS,
    LIFTED_STRUCTURE,
    MARGIN,
    MEAN,
    MULTI_SIMILARITY,
    N_PAIRS,
    NO_FLOOR,
    SUM,
    SUP_CON,
    TRIPLET,
)
from xbm.kernels import kernel_key, resources

MAX_ANCHORS = (1 << 15) - 2  # the label table numbers them with 16 bits
MAX_COLUMNS = 4096
TABLE_SIZE = 1 << 15  # entries of the label table
MAX_PARTS = 1024  # parts of the bank for which positives are counted
LIST_BUDGET = 7 << 16  # entries in all lists of positives together, 12 bytes each
MIN_LISTED = 512  # entries in each list
REDUCE_COLUMNS, REDUCE_SPLITS = 32, 256  # columns, and partial gradients, that `finish` adds up at a time

# Rows up to which a bank is small. In a small bank many tiles have valid pairs, and few rows remain to be searched. For a
# large bank, positives are found first (contrastive), labels are loaded only for tiles with a valid pair, and the copy engine
# fetches the rows.
SMALL = 1 << 18
TWO_GRADIENTS = 64  # columns up to which the positives' gradient fits beside the negatives'

KINDS = {
    "contrastive": CONTRASTIVE.value, "triplet": TRIPLET.value, "multi_similarity": MULTI_SIMILARITY.value,
    "margin": MARGIN.value, "sup_con": SUP_CON.value, "lifted_structure": LIFTED_STRUCTURE.value, "n_pairs": N_PAIRS.value,
    "circle": CIRCLE.value,
}  # fmt: skip
# The hyper-parameters that a kernel reads, and what it calls them; see `loss_formulas`.
HYPERPARAMETERS = {
    "contrastive": ("margin",),
    "triplet": ("margin",),
    "multi_similarity": ("epsilon", "alpha", "beta", "base"),
    "margin": ("boundary", "margin"),
    "sup_con": ("temperature",),
    "lifted_structure": (),  # its base cancels
    "n_pairs": ("temperature",),
    "circle": ("margin", "gamma"),
}
ARGUMENTS: dict[str, Callable[..., dict[str, float]]] = {
    "contrastive": lambda margin: {"margin": margin},
    "triplet": lambda margin: {"margin": margin},
    "multi_similarity": lambda epsilon, alpha, beta, base: {"margin": epsilon, "alpha": alpha, "beta": beta, "base": base},
    "margin": lambda boundary, margin: {
        "margin": 1 - (boundary + margin) ** 2 / 2, "beta": boundary + margin, "base": boundary - margin
    },
    "sup_con": lambda temperature: {"beta": 1 / temperature},
    "lifted_structure": dict,
    "n_pairs": lambda temperature: {"beta": 1 / temperature},
    "circle": lambda margin, gamma: {"beta": gamma, "base": margin},
}  # fmt: skip
POSITIVE = ("temperature", "gamma", "boundary")  # with other values, these losses are left to the other engines
REDUCTIONS = {"sum": SUM.value, "mean": MEAN.value, "balanced": BALANCED.value}


class LossConstants(NamedTuple):
    """A loss as plain numbers."""

    kind: int
    reduction: int
    margin: float = NO_FLOOR.value  # multi-similarity: epsilon
    alpha: float = 1.0
    beta: float = 1.0
    base: float = 0.0
    learned: bool = False  # whether beta is 1/τ of a learned temperature, which the kernels read on the device


def loss_constants(loss: Any) -> LossConstants | None:
    """The numbers of a loss that has a kernel; None for any other loss.

    A class has a kernel if its own body states `kernel`. A subclass does not inherit it, because it may compute something
    else. Tensors and parameters are not read, because the kernels have no gradient for them; but a learned log τ has one, which
    follows from that of the anchors (`temperature_gradient`).
    """
    kernel = type(loss).__dict__.get("kernel")
    if kernel not in KINDS or loss.reduction not in REDUCTIONS or (kernel == "multi_similarity" and not loss.mining):
        return None
    if getattr(loss, "log_temperature", None) is not None:
        return LossConstants(KINDS[kernel], SUM.value, learned=True)
    values = {name: getattr(loss, name) for name in HYPERPARAMETERS[kernel]}
    for name, value in values.items():
        if not isinstance(value, int | float) or (name in POSITIVE and not value > 0):
            return None
    numbers: dict[str, Any] = {name: float(value) for name, value in ARGUMENTS[kernel](**values).items()}
    return LossConstants(KINDS[kernel], SUM.value if loss.one_reduction else REDUCTIONS[loss.reduction], **numbers)


def largest_logit(c: LossConstants) -> float:
    """A bound of the exponents of the negatives; where their sum stands alone, of their absolute values too."""
    if c.learned:
        return math.inf
    if c.kind == CIRCLE.value:
        return c.beta * max(abs(1.02**2 - c.base**2), c.base**2)
    return c.beta * (1.02 - c.base)


class Tiles(NamedTuple):
    """Tile sizes of the pass over the bank, and how its programs run."""

    anchors: int  # BLOCK_M
    rows: int  # BLOCK_N
    columns: int  # BLOCK_D: columns of the gradient that a program adds up
    step: int  # BLOCK_K: columns that a product takes at a time, if rows are too wide to be kept on chip
    narrow: bool  # whole rows are kept on chip
    warps: int
    stages: int
    per_processor: int
    precision: str = "ieee"  # of float32 products


def tiles(D: int, half: bool, heavy: bool, shared: int) -> Tiles:
    """The tile sizes for D columns.

    Args:
        half: whether the bank has 16-bit numbers.
        heavy: whether a tile with valid pairs takes long (multi-similarity, triplet), so that fewer, larger ones are better.
        shared: bytes of shared memory available to one program.
    """
    width = max(64, triton.next_power_of_2(D))
    if half:
        narrow = {
            64: Tiles(64, 64, 64, 64, True, 4, 4, 2),
            128: Tiles(64, 64, 128, 64, True, 4, 3, 2),
            256: Tiles(64, 64, 256, 64, True, 4, 2, 2),
            512: Tiles(64, 64, 512, 64, True, 8, 2, 1) if heavy else Tiles(64, 32, 512, 64, True, 8, 4, 1),
        }.get(width)
        wide = Tiles(64, 64, 256, 64, False, 8, 3, 1)
    else:
        narrow = Tiles(32, 32, width, 32, True, 8, 2, 1) if width <= 512 else None
        wide = Tiles(64, 32, 256, 32, False, 8, 3, 1)
    size = 2 if half else 4
    if D * size % 16:  # the copy engine cannot fetch such rows: they pass through registers, few columns at a time
        return wide._replace(columns=128)
    if narrow is None or (narrow.anchors + narrow.stages * narrow.rows) * width * size + 10240 > shared:
        return wide
    return narrow


class Plan(NamedTuple):
    """The grids of a step."""

    tiles: Tiles
    blocks: int  # blocks of anchors times slices of columns
    num_splits: int  # programs of the pass for each block,
    rows_per_split: int  # and the rows that each takes
    num_parts: int  # parts of the bank for which positives are counted,
    rows_per_part: int  # and their size
    capacity: int  # entries in an anchor's list of positives
    column_blocks: int  # of REDUCE_COLUMNS
    group: int  # parts that are listed at a time
    lookups: int  # programs that count positives, 1,024 rows each
    splits_padded: int  # to a power of two
    parts_padded: int


@lru_cache(maxsize=256)
def plan(m: int, M: int, D: int, half: bool, heavy: bool, device: torch.device) -> Plan:
    processors, shared = resources(device)
    t = tiles(D, half, heavy, shared)
    blocks = triton.cdiv(m, t.anchors) * triton.cdiv(D, t.columns)
    num_splits, rows_per_split = _divide(M, processors * t.per_processor // blocks, t.rows)
    num_parts, rows_per_part = _divide(M, max(64, min(MAX_PARTS, (1 << 20) // m)), 256)
    return Plan(
        t, blocks, num_splits, rows_per_split, num_parts, rows_per_part, capacity(m, M),
        column_blocks=triton.cdiv(D, REDUCE_COLUMNS),
        group=max(1, 1024 // rows_per_part),
        lookups=max(1, triton.cdiv(M, 1024)),
        splits_padded=triton.next_power_of_2(num_splits),
        parts_padded=triton.next_power_of_2(num_parts),
    )  # fmt: skip


def capacity(m: int, M: int) -> int:
    """How many positives an anchor's list holds: all that are possible, within the budget."""
    return max(1, min(M, max(LIST_BUDGET // m, MIN_LISTED)))


def _divide(M: int, programs: int, tile: int) -> tuple[int, int]:
    """Divides M rows into at most `programs` equal parts of whole tiles: the number of parts, and their size."""
    size = max(1, triton.cdiv(triton.cdiv(M, tile), max(1, programs))) * tile
    return max(1, triton.cdiv(M, size)), size


class Case(NamedTuple):
    """Everything about a step except its data: what decides which kernels run, on which grids."""

    loss: LossConstants
    m: int
    M: int
    D: int
    device: torch.device
    anchor_dtype: torch.dtype
    bank_dtype: torch.dtype
    stats: bool
    in_batch: bool
    gradients: bool
    row_gradient: bool
    has_ids: bool
    has_sound: bool
    exclude_id: bool
    exclude_slot: int
    small: bool  # whether the bank is, see SMALL


class Settings(NamedTuple):
    """What follows from a case."""

    kind: int
    plan: Plan
    key: int  # under which compiled kernels are stored
    half: bool
    rescale: bool  # whether exponentials could overflow, so that the pass has to follow the largest
    headroom: float
    scale: float  # of the weights in the second product, which keeps ranks and exponentials inside float16
    tolerance: float
    by_descriptor: bool  # whether the copy engine fetches the rows


@lru_cache(maxsize=1024)
def settings(case: Case) -> Settings:
    c, kind = case.loss, case.loss.kind
    if kind == CONTRASTIVE.value and case.small and (c.reduction == SUM.value or case.D <= TWO_GRADIENTS):
        kind = CONTRASTIVE_ONE_PASS.value
    half = case.bank_dtype != torch.float32
    p = plan(case.m, case.M, case.D, half, kind >= MULTI_SIMILARITY.value, case.device)
    headroom, scale = 60.0, 1.0
    if kind == TRIPLET.value:
        scale = 2.0**-10
    elif (kind == MULTI_SIMILARITY.value or kind >= SUP_CON.value) and case.bank_dtype == torch.float16:
        headroom, scale = 6.0, 64.0
        if kind == CIRCLE.value:  # a slope of up to 1.02 + |m| comes on top
            scale = min(scale, 2.0 ** math.floor(math.log2(160 / (1.02 + abs(c.base)))))
    rescale = largest_logit(c) > headroom
    key = kernel_key(kind, c.reduction, c.learned, rescale, scale, p.tiles, *case[1:])
    by_descriptor = not case.small and half and p.tiles.narrow
    return Settings(kind, p, key, half, rescale, headroom, scale, tolerance(case.anchor_dtype), by_descriptor)
