"""What the last kernels decide: which anchors are sound, what unsound ones add, and the gradient in the rows."""

import pytest
import torch

from tests.xbm.engine.triton.interpreted import EVERY, LOSSES, check, memory_with, oracle
from xbm import ContrastiveLoss, InputError
from xbm.engine import triton as kernels
from xbm.engine.pairing import Pairing


@pytest.mark.parametrize("in_batch", [False, True], ids=["bank", "batch"])
@pytest.mark.parametrize("name", EVERY)
def test_unsound_anchors_add_nothing_and_are_counted(name, in_batch):
    anchors, labels, ids, memory = memory_with(m=8, D=12)
    labels = labels % 2
    memory.row_labels.remainder_(2)
    bad = anchors.detach().clone()
    bad[1], bad[4] = torch.nan, bad[4] * 1.5
    ids[6] = -3
    kept = torch.tensor([0, 2, 3, 5, 7])
    loss_fn = LOSSES[name](engine="triton")
    bad.requires_grad_()
    loss, stats = loss_fn(bad, labels, None if in_batch else memory, ids=ids, return_stats=True)
    loss.backward()
    good = anchors.detach()[kept].requires_grad_()
    value, gradient, _, expected = oracle(loss_fn, good, labels[kept], None if in_batch else memory, ids[kept], None)
    assert torch.allclose(loss.double() * 8, value * 5, rtol=1e-5)
    assert torch.allclose(bad.grad[kept].double() * 8, gradient / 3 * 5, atol=1e-5)
    assert (bad.grad[[1, 4, 6]] == 0).all() and int(stats.unsound) == 3
    assert stats.valid_negatives[kept].tolist() == expected.valid_negatives.tolist()
    assert stats.valid_negatives[[1, 4, 6]].tolist() == [0, 0, 0]
    with pytest.raises(InputError, match="3 anchors were skipped"):
        stats.read()


def test_a_caller_may_rule_anchors_out():
    anchors, labels, ids, memory = memory_with(m=5)
    sound = torch.tensor([True, False, True, True, True])
    p = Pairing(memory.rows, memory.row_labels, memory.stamps, labels, sound, ids, memory.row_ids)
    result = kernels.compare(ContrastiveLoss(), anchors, p, True, False, True)
    assert result.statistics[1][1] == 0 and result.unsound == 1


@pytest.mark.parametrize("name", EVERY)
def test_the_gradient_of_the_rows(name):
    anchors, labels, ids, memory = memory_with(m=9, M=97, D=21, update="backprop")
    check(LOSSES[name](engine="triton", reduction="mean"), anchors, labels, memory, ids)
