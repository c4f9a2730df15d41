"""Rows that repeat an earlier row bit for bit, so that ties between them can be made certain.

A matrix product may add up the entries near its edge in another order than those in its middle. Two copies of one picture would
then differ in the last bit and be ranked by chance; copying one's similarities to the other rules that out on every device.
"""

import torch
from torch import Tensor


def find_copies(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the rows of (N, D) float32 that equal an earlier one, and for each the index of that first one.

    Example:
        >>> again, first = find_copies(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [1.0, 2.0]]))
        >>> again.tolist(), first.tolist()
        ([2, 3], [0, 0])
    """
    count, dim = rows.shape
    step = max(1, 2**18 // dim)  # small enough to stay in a CPU's cache
    hashes, order = row_hashes(rows).sort(stable=True)
    place = torch.arange(count, device=rows.device)
    starts = torch.ones(count, dtype=torch.bool, device=rows.device)
    starts[1:] = hashes[1:] != hashes[:-1]
    first = order[torch.where(starts, place, 0).cummax(0).values]
    again, first = order[~starts], first[~starts]
    # Different rows may share a hash.
    pairs = zip(again.split(step), first.split(step), strict=True)
    equal = torch.cat([(rows[a] == rows[b]).all(1) for a, b in pairs])
    return again[equal], first[equal]


def row_hashes(rows: Tensor, seed: int = 0) -> Tensor:
    """(N,) int64, equal for equal rows of (N, D) float32 and hardly ever for others."""
    dim = rows.shape[1]
    weights = torch.randint(-(2**62), 2**62, (dim,), generator=torch.Generator().manual_seed(seed)).to(rows.device) * 2 + 1
    step = max(1, 2**18 // dim)
    return torch.cat([(part.view(torch.int32) * weights).sum(1) for part in rows.split(step)])
