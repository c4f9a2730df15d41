"""How a step is cut up: tile sizes, programs, and the memory they share. Depends on shapes and types only, never on data.

Budgets of the pass over the bank for 512 columns of 16 bits, on a multiprocessor with 227 KB of shared memory and 64 Ki
registers: 64 anchors 64 KB + two tiles of 64 rows 128 KB + their weights 8 KB = 200 KB; the gradient, 64 × 512 float32, is
128 of the 255 registers of each of 256 threads. Fewer columns leave room for two programs on a multiprocessor.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from xbm.kernels.launch import resources

COLUMNS, PARTS = 32, 256  # of a gradient, and of its parts, that are added up at a time
MOST = (1 << 15) - 2  # anchors: the table numbers them with 16 bits
PLACES = 1 << 15  # of the table of labels
SCANS = 1024  # parts of the bank for which positives are counted, at most
LISTED = 7 << 16  # entries in all lists of positives together, 12 bytes each
LEAST_LISTED = 512  # entries in each
WIDEST = 4096  # columns; beyond, streaming


class Tiles(NamedTuple):
    """Of the pass over the bank: anchors, rows and columns of a tile, and how its programs run."""

    anchors: int
    rows: int
    columns: int  # of the gradient that a program adds up
    step: int  # columns a product takes at a time, where rows are too wide to be kept
    narrow: bool
    warps: int
    stages: int
    per_processor: int
    precision: str = "ieee"  # of float32 products


def tiles(D: int, half: bool, heavy: bool, shared: int) -> Tiles:
    """The sizes for D columns; `shared` is what a program may have of shared memory, in bytes.

    `heavy`: a tile with valid pairs takes long (multi-similarity, triplet), so that fewer, larger ones are better.
    """
    width = max(64, triton.next_power_of_2(D))
    if half:
        choice = {
            64: Tiles(64, 64, 64, 64, True, 4, 4, 2),
            128: Tiles(64, 64, 128, 64, True, 4, 3, 2),
            256: Tiles(64, 64, 256, 64, True, 4, 2, 2),
            512: Tiles(64, 64, 512, 64, True, 8, 2, 1) if heavy else Tiles(64, 32, 512, 64, True, 8, 4, 1),
        }.get(width)
        otherwise = Tiles(64, 64, 256, 64, False, 8, 3, 1)
    else:
        choice = Tiles(32, 32, width, 32, True, 8, 2, 1) if width <= 512 else None
        otherwise = Tiles(64, 32, 256, 32, False, 8, 3, 1)
    size = 2 if half else 4
    if D * size % 16:  # rows that the copy engine cannot take whole: through registers, few columns at a time
        return otherwise._replace(columns=128)
    if choice is None:
        return otherwise
    if (choice.anchors + choice.stages * choice.rows) * width * size + 10240 > shared:
        return otherwise
    return choice


class Plan(NamedTuple):
    """A step's grid. A program takes `per` rows, and there are `splits` of them a block of anchors."""

    tiles: Tiles
    blocks: int  # of anchors, times slices of columns
    splits: int
    per: int
    scans: int  # the same for the parts in which positives are looked for
    scanned: int
    capacity: int  # of an anchor's list of positives
    column_blocks: int  # of COLUMNS
    group: int  # parts that `enlist` takes at a time
    lookups: int  # programs of `count`, 1,024 rows each
    clears: int  # programs of `mark` that clear counts, 8,192 each
    splits_padded: int  # to powers of two
    scans_padded: int


@lru_cache(maxsize=256)
def plan(m: int, M: int, D: int, half: bool, heavy: bool, device: torch.device) -> Plan:
    processors, shared = resources(device)
    t = tiles(D, half, heavy, shared)
    blocks = triton.cdiv(m, t.anchors) * triton.cdiv(D, t.columns)
    splits, per = _cut(M, processors * t.per_processor // blocks, t.rows)
    scans, scanned = _cut(M, max(64, min(SCANS, (1 << 20) // m)), 256)
    padded = triton.next_power_of_2(splits), triton.next_power_of_2(scans)
    sizes = triton.cdiv(D, COLUMNS), max(1, 1024 // scanned), max(1, triton.cdiv(M, 1024)), triton.cdiv(m * scans, 8192)
    return Plan(t, blocks, splits, per, scans, scanned, capacity(m, M), *sizes, *padded)


def capacity(m: int, M: int) -> int:
    """How many positives an anchor's list holds: all there can be, if that is not too much."""
    return max(1, min(M, max(LISTED // m, LEAST_LISTED)))


def _cut(M: int, programs: int, least: int) -> tuple[int, int]:
    """M rows in at most `programs` equal parts of whole tiles of `least` rows: how many, and of what size."""
    per = max(1, triton.cdiv(triton.cdiv(M, least), max(1, programs))) * least
    return max(1, triton.cdiv(M, per)), per
