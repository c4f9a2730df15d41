"""What every product of embeddings shares: unit rows, full precision, blocks that fit into the work space."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WORK_BYTES = 256 * 2**20  # work space, beside one float32 copy of the embeddings; never less than a block of 8 queries

QUERY_MULTIPLE = 8  # counting packs the bytes of eight queries into one integer
GALLERY_MULTIPLE = 64  # and walks the gallery in strips of so many rows


def unit_rows(embeddings: Tensor) -> tuple[Tensor, bool]:
    """Rows scaled to length 1 as float32, padded with zero rows, and whether all of them are finite.

    The padding fills the last `GALLERY_MULTIPLE` and is never empty, so that there is a row which stands for nothing.
    A row of zeros has no direction and stays zero: its similarity to everything is 0.

    Args:
        embeddings: (N, D) of any float type.

    Returns:
        (N + padding, D) float32, and a flag.
    """
    count, dim = embeddings.shape
    padded = (count // GALLERY_MULTIPLE + 1) * GALLERY_MULTIPLE
    unit = torch.zeros(padded, dim, dtype=torch.float32, device=embeddings.device)
    finite = torch.ones((), dtype=torch.bool, device=embeddings.device)
    step = max(1, WORK_BYTES // (4 * 8 * dim))
    for start in range(0, count, step):
        rows = embeddings[start : start + step]
        rows = rows if rows.dtype == torch.float64 else rows.float()
        # Squares of entries beyond 1e19 or below 1e-23 leave float32: divide by the largest first.
        largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=1, keepdim=True)
        finite &= torch.isfinite(largest).all()
        rows = rows / largest.masked_fill(largest == 0, 1)
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        unit[start : start + len(rows)] = rows / length.masked_fill(length == 0, 1)
    return unit, bool(finite)


def padded(queries: Tensor) -> Tensor:
    """Indices of a block of queries, the last one repeated up to a multiple of `QUERY_MULTIPLE`."""
    missing = -len(queries) % QUERY_MULTIPLE
    return torch.cat([queries, queries[-1:].expand(missing)])


def block_size(bytes_per_query: int) -> int:
    """How many queries fit into the work space together."""
    return max(QUERY_MULTIPLE, WORK_BYTES // bytes_per_query // QUERY_MULTIPLE * QUERY_MULTIPLE)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products of float32 are float32 inside, whatever TF32, bfloat16 or autocast setting the caller trains with."""
    settings = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
