"""How a step is cut up: every row once, programs and memory within bounds."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.known import NAMES
from xbm import (
    CircleLoss,
    ContrastiveLoss,
    LiftedStructureLoss,
    MarginLoss,
    MultiSimilarityLoss,
    NPairsLoss,
    SupConLoss,
    TripletLoss,
)
from xbm.losses import LOSSES

pytest.importorskip("triton", minversion="3.6", reason="the kernels need Triton 3.6 or later")

from xbm.engine import streaming, triton
from xbm.engine.triton import plan
from xbm.engine.triton.primitives import NO_FLOOR

PROCESSORS, SHARED = 132, 227 * 1024


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(plan, "resources", lambda device: (PROCESSORS, SHARED))


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("m", [1, 64, 65, 700, 4096])
@pytest.mark.parametrize("M", [0, 1, 63, 64, 59_551, 1_000_000, 50_000_000])
@pytest.mark.parametrize("D", [16, 100, 129, 512, 2048])
def test_every_row_has_one_program_and_the_grid_fills_the_device(D, M, m, half, h200):
    p = plan.plan(m, M, D, half, False, torch.device("cpu"))
    for parts, size in ((p.num_splits, p.rows_per_split), (p.num_parts, p.rows_per_part)):
        assert parts * size >= M and (parts - 1) * size < max(M, 1) and size % 16 == 0 and 1 <= parts < 65536
    programs = p.blocks * p.num_splits
    assert programs <= max(PROCESSORS * p.tiles.per_processor, p.blocks)
    if M >= 59_551 and p.blocks <= PROCESSORS:
        assert programs > 0.6 * PROCESSORS
    assert 1 <= p.capacity <= max(M, 1)


def test_the_memory_of_a_step_is_bounded(h200):
    """One partial gradient a multiprocessor and the lists: 24 MB at the paper's size, whatever the bank's."""
    for M in (59_551, 1_000_000, 10_000_000):
        p = plan.plan(64, M, 512, True, False, torch.device("cpu"))
        partial, lists, scans = (
            p.num_splits * 64 * (512 + 6) * 4,
            64 * p.capacity * 12,
            64 * p.num_parts * 4 + 2 * plan.TABLE_SIZE,
        )
        assert partial + lists + scans <= 24e6


def test_small_problems_list_everything():
    assert plan.capacity(64, 7000) == 7000 and plan.capacity(64, 59_551) == 7168 and plan.capacity(4096, 4096) == 512


def test_tiles_fit_smaller_devices_and_rows_of_any_alignment():
    assert plan.tiles(512, True, True, SHARED).narrow and not plan.tiles(512, True, True, 99 * 1024).narrow
    assert not plan.tiles(129, True, True, SHARED).narrow and plan.tiles(129, True, True, SHARED).columns == 128
    assert not plan.tiles(2048, True, True, SHARED).narrow


class Sharper(ContrastiveLoss):
    name = "sharper"

    def negative(self, s, p, spread):
        return super().negative(2 * s, p, spread)


@pytest.mark.parametrize(
    ("loss", "constants"),
    [
        (ContrastiveLoss(margin=0.25), (1, 0, 0.25)),
        (ContrastiveLoss(margin=1, reduction="balanced"), (1, 2, 1.0)),
        (MultiSimilarityLoss(alpha=3, beta=40.0, base=0.2, epsilon=0.3), (2, 0, 0.3, 3.0, 40.0, 0.2)),
        (TripletLoss(margin=0.1, reduction="mean"), (3, 1, 0.1)),
        (MarginLoss(boundary=1.0, margin=0.5, reduction="mean"), (4, 1, 1 - 1.5**2 / 2, 1.0, 1.5, 0.5)),
        (SupConLoss(temperature=0.25, reduction="mean"), (5, 0, NO_FLOOR.value, 1.0, 4.0)),
        (SupConLoss(temperature=0.25, learn_temperature=True), (5, 0, NO_FLOOR.value, 1.0, 1.0, 0.0, True)),
        (LiftedStructureLoss(base=0.3), (6, 0)),
        (NPairsLoss(temperature=0.5), (7, 0, NO_FLOOR.value, 1.0, 2.0)),
        (CircleLoss(margin=0.25, gamma=80), (8, 0, NO_FLOOR.value, 1.0, 80.0, 0.25)),
    ],
)
def test_a_loss_that_has_a_kernel_is_plain_numbers(loss, constants):
    assert plan.loss_constants(loss) == plan.LossConstants(*constants)


def test_a_subclass_does_not_run_the_kernel_of_its_base():
    assert plan.loss_constants(Sharper(margin=0.25)) is None


@pytest.mark.parametrize("value", [torch.tensor(0.25), nn.Parameter(torch.tensor(0.25)), "0.25", None])
@pytest.mark.parametrize("cls", [ContrastiveLoss, TripletLoss])
def test_hyper_parameters_that_are_not_plain_numbers_are_left_to_the_other_engines(cls, value):
    loss, v = cls(), torch.zeros(3, 8)
    assert triton.supports(loss, v, v)
    loss.__dict__["margin"] = value
    assert plan.loss_constants(loss) is None and not triton.supports(loss, v, v)


@pytest.mark.parametrize(
    ("loss", "most", "least"),
    [
        (SupConLoss(0.05), 20.4, -20.4), (NPairsLoss(0.1), 10.2, -10.2), (LiftedStructureLoss(), 1.02, -1.02),
        (CircleLoss(gamma=100, margin=0.2), 100.04, -4.0), (CircleLoss(gamma=10, margin=2.0), -29.596, -40.0),
        (SupConLoss(0.05, learn_temperature=True), math.inf, -math.inf),
    ],
)  # fmt: skip
def test_exponents_stay_within_their_bound(loss, most, least):
    assert plan.largest_logit(plan.loss_constants(loss)) == pytest.approx(max(abs(most), abs(least)))


def test_losses_without_mining_or_without_a_kernel_are_left_to_the_other_engines():
    v = torch.zeros(3, 8)
    for loss in (MultiSimilarityLoss(mining=False), nn.Identity()):
        assert not triton.supports(loss, v, v)


def test_auto_runs_only_kernels_that_were_checked_on_a_gpu(monkeypatch):
    """A stand-in for a tensor on a GPU; the other losses run theirs if asked for."""
    monkeypatch.setattr("xbm.losses.pair.has_kernels", lambda device: True)
    v = torch.zeros(3, 8)
    given = SimpleNamespace(is_cuda=True, device=v.device, dtype=v.dtype, shape=v.shape, requires_grad=False)
    for name in NAMES:
        loss = LOSSES[name]
        assert loss.kernel == name and triton.supports(loss(), given, v)
        checked = name in ("contrastive", "multi_similarity", "triplet")
        assert (name in triton.CHECKED_ON_GPU) == checked
        assert loss()._choose_engine(given, None, None) is (triton if checked else streaming)
        assert loss(engine="triton")._choose_engine(given, None, None) is triton
