"""Who is compared with whom: the masks against plain loops, the lists against the masks."""

import pytest
import torch

from tests.xbm.engine.pairs import pairing
from xbm.engine.pairing import Pairing, count_same_label, list_related

SELF_BY = ["id", "slot", "id and slot"]


@pytest.mark.parametrize("self_by", SELF_BY)
def test_masks_say_what_plain_loops_say(self_by):
    _, p = pairing(self_by=self_by)
    p = p._replace(sound=torch.tensor([True, True, False, True, True, True]))
    positive, negative = p.masks()
    for j in range(len(p.stamps)):
        for i in range(len(p.labels)):
            by_id = "id" in self_by and p.row_ids[j] == p.ids[i]
            by_slot = "slot" in self_by and p.own[i] == j
            counts = p.stamps[j] >= 0 and not by_id and not by_slot and bool(p.sound[i])
            same = p.row_labels[j] == p.labels[i]
            assert positive[j, i] == (counts and same)
            assert negative[j, i] == (counts and not same)


@pytest.mark.parametrize("self_by", SELF_BY)
@pytest.mark.parametrize(("start", "stop"), [(0, 30), (30, 97), (96, 97), (13, 13)])
def test_masks_of_a_part_are_the_part_of_the_masks(self_by, start, stop):
    _, p = pairing(self_by=self_by)
    for whole, part in zip(p.masks(), p.masks(start, stop)):
        assert torch.equal(whole[start:stop], part)


@pytest.mark.parametrize("self_by", SELF_BY)
@pytest.mark.parametrize(("block", "step"), [(65536, 4096), (10, 3), (1, 1)])
def test_related_pairs_are_exactly_those_that_are_no_negatives(self_by, block, step):
    _, p = pairing(self_by=self_by)
    related = list_related(p, None, block, step)
    positive, negative = p.masks()
    listed = set(zip(related.row.tolist(), related.anchor.tolist(), related.positive.tolist()))
    written = (p.stamps >= 0).nonzero()[:, 0].tolist()
    expected = {(j, i, bool(positive[j, i])) for j in written for i in range(len(p.labels)) if not negative[j, i]}
    assert listed == expected and len(related.row) == len(expected)
    assert (related.row.diff() >= 0).all(), "ordered by row"
    assert {kind for _, _, kind in listed} == {True, False}


def test_nothing_related_gives_empty_lists():
    _, p = pairing(self_by="slot")
    related = list_related(p._replace(labels=p.labels + 5000, own=torch.full_like(p.own, -1)))
    assert all(len(x) == 0 for x in related) and related.positive.dtype == torch.bool


@pytest.mark.parametrize("block", [65536, 10])
def test_count_is_the_number_of_pairs_that_share_a_label(block):
    _, p = pairing(m=9, classes=3)  # several anchors of a class
    assert count_same_label(p, block) == (p.row_labels[:, None] == p.labels).sum()


def test_an_id_on_another_label_is_the_anchor_itself_and_not_a_negative():
    p = Pairing(
        rows=torch.zeros(2, 3),
        row_labels=torch.tensor([1, 1]),
        stamps=torch.zeros(2, dtype=torch.int64),
        labels=torch.tensor([0]),
        sound=torch.ones(1, dtype=torch.bool),
        ids=torch.tensor([5]),
        row_ids=torch.tensor([5, 6]),
    )
    assert p.masks()[1].tolist() == [[False], [True]]
    assert list_related(p).row.tolist() == [0]


def test_too_many_positives_are_not_listed():
    _, p = pairing()
    pairs = count_same_label(p)
    assert list_related(p, pairs) is not None and list_related(p, pairs - 1) is None
