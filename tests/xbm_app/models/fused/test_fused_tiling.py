"""How maps are cut into tiles."""

import pytest
import torch

from xbm.engine.triton import plan
from xbm_app.models.fused import tiling

CPU = torch.device("cpu")
KINDS = [tiling.STATISTICS, tiling.SUMS, tiling.EACH, tiling.POOL, tiling.NEIGHBORS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("C", [1, 16, 24, 64, 67, 96, 208, 832, 2048])
@pytest.mark.parametrize("P", [2, 49, 3136, 802_816, 20_000_000])
def test_every_program_has_a_tile_and_no_channel_is_left_out(P, C, kind, monkeypatch):
    monkeypatch.setattr(plan, "resources", lambda device: (132, 227 * 1024))
    k = tiling.cut(P, C, kind, CPU)
    assert k.blocks * k.channels >= C > (k.blocks - 1) * k.channels
    assert k.pixels * k.channels == kind.tile and k.pixels & (k.pixels - 1) == 0
    assert (k.splits - 1) * k.pixels < P and k.splits < 65536
    assert k.splits * k.blocks <= max(132 * kind.per_processor, k.blocks)
    assert k.blocks <= -(-C // 16), "one ticket a block: fuse() hands out one for 16 channels"


def test_narrow_blocks_are_taken_where_wide_ones_would_be_mostly_empty():
    assert [tiling.channel_block(C) for C in (16, 24, 64, 96, 192, 480)] == [16, 32, 64, 32, 64, 64]


def test_a_tensor_off_the_grid_of_16_bytes_has_no_key():
    x = torch.empty(64)
    assert tiling.key(CPU, (x, x), 3) == (CPU, torch.float32, torch.float32, 3) and tiling.key(CPU, (x, x[1:]), 3) is None
