"""Random anchors and rows in which every kind of pair occurs, for the tests of the engine's parts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xbm.engine.pairing import Pairing


def pairing(
    m: int = 6,
    M: int = 97,
    D: int = 5,
    self_by: str = "id",
    classes: int = 4,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Pairing]:
    """Anchors (m, D) and their pairing with M rows, one in seven never written; `self_by` "id", "slot", or both.

    Anchor 0 has no positives; anchor 1's id lies on rows of several classes; one in three anchors has no own slot.
    """
    torch.manual_seed(0)
    anchors = F.normalize(torch.randn(m, D, dtype=torch.float64)).to(dtype)
    rows = F.normalize(torch.randn(M, D, dtype=torch.float64)).to(dtype)
    labels = torch.arange(m) % classes
    labels[0] = 1000
    ids = torch.arange(m) * 2
    row_ids = torch.randint(0, 3 * m, (M,))
    own = torch.randint(0, M, (m,))
    own[::3] = -1
    return anchors, Pairing(
        rows=rows,
        row_labels=torch.randint(0, classes + 3, (M,)),  # some of no anchor's class
        stamps=torch.where(torch.arange(M) % 7 == 3, -1, torch.arange(M)),
        labels=labels,
        sound=torch.ones(m, dtype=torch.bool),
        ids=ids if "id" in self_by else None,
        row_ids=row_ids if "id" in self_by else None,
        own=own if "slot" in self_by else None,
    )
