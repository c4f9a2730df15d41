"""The front door: which engine runs, no anchors, unknown names, the weights of a matrix."""

import pytest
import torch

from tests.known import NAMES
from tests.xbm.engine.pairs import pairing
from xbm import ContrastiveLoss, InputError
from xbm import engine as engines
from xbm.engine import compare, dense_weights, reference
from xbm.losses import LOSSES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_batch", [False, True])
def test_auto_streaming_and_reference_agree(name, in_batch):
    found = {}
    for engine in ("auto", "streaming", "reference"):
        anchors, p = pairing(self_by="slot" if in_batch else "id")
        anchors.requires_grad_()
        if in_batch:
            m = torch.arange(len(anchors))
            p = p._replace(rows=anchors, row_labels=p.labels % 2, labels=p.labels % 2, stamps=m, own=m)
        value, stats = compare(LOSSES[name](), anchors, p, engine, True)
        value.backward()
        assert len(stats) == 5
        found[engine] = (value.detach(), anchors.grad, *(x.double() for x in stats))
    for engine in ("auto", "streaming"):
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(found[engine], found["reference"]))


def test_the_reference_runs_only_when_named(monkeypatch):
    def refuse(*_):
        raise AssertionError("the (m, M) matrix was made")

    monkeypatch.setattr(reference, "compare", refuse)
    anchors, p = pairing()
    for engine in ("auto", "streaming"):
        compare(ContrastiveLoss(), anchors, p, engine, False)
    with pytest.raises(AssertionError, match="was made"):
        compare(ContrastiveLoss(), anchors, p, "reference", False)


@pytest.mark.parametrize("engine", ["auto", "streaming", "reference"])
def test_no_anchors_give_zero_that_can_be_differentiated(engine):
    anchors, p = pairing()
    x = anchors.clone().requires_grad_()
    none = p._replace(labels=p.labels[:0], sound=p.sound[:0], ids=p.ids[:0])
    value, stats = compare(ContrastiveLoss(), x[:0], none, engine, True)
    value.backward()
    assert value == 0 and value.shape == () and (x.grad == 0).all()
    assert [len(s) for s in stats] == [0] * 5 and [s.is_floating_point() for s in stats] == [False, False, True, True, True]


def test_rows_are_differentiated_only_where_somebody_asks(monkeypatch):
    asked = []
    real = engines.stream

    def watch(*given):
        asked.append(given[-2])
        return real(*given)

    monkeypatch.setattr(engines, "stream", watch)
    anchors, p = pairing()
    compare(ContrastiveLoss(), anchors, p, "streaming", False)
    p.rows.requires_grad_()
    compare(ContrastiveLoss(), anchors, p, "streaming", False)
    with torch.no_grad():
        compare(ContrastiveLoss(), anchors, p, "streaming", False)
    assert asked == [False, True, False]


@pytest.mark.parametrize(("engine", "small"), [("streaming", -1), ("streaming", 1 << 14), ("reference", 0)])
def test_an_unsound_anchor_adds_nothing_where_shapes_are_fixed(engine, small, monkeypatch):
    """What another device does, played on this one: there the anchor could not be refused."""
    monkeypatch.setattr("xbm.engine.streaming.MOST_LISTED", -1)
    monkeypatch.setattr("xbm.engine.streaming.SMALL", small)
    for name in NAMES:
        anchors, p = pairing()
        p = p._replace(sound=torch.tensor([True, False, True, True, False, True]))
        value, stats = compare(LOSSES[name](), anchors, p, engine, True)
        kept = p.sound.nonzero()[:, 0]
        some = p._replace(labels=p.labels[kept], sound=p.sound[kept], ids=p.ids[kept])
        expected, _ = compare(LOSSES[name](), anchors[kept], some, "reference", True)
        assert torch.allclose(value * len(anchors), expected * len(kept))
        assert stats[0][~p.sound].sum() == stats[1][~p.sound].sum() == 0


def test_weights_come_an_anchor_a_row_and_without_a_graph():
    S = torch.tensor([[0.9, 0.6, 0.4], [0.1, 0.7, 0.8]], requires_grad=True)
    positive = torch.tensor([[True, False, False], [False, True, False]])
    w = dense_weights(ContrastiveLoss(), S, positive, ~positive)
    assert w.tolist() == [[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]] and not w.requires_grad


def test_an_unknown_engine_is_told_with_the_nearest_name():
    with pytest.raises(InputError, match="unknown engine 'refrence': did you mean 'reference'"):
        ContrastiveLoss(engine="refrence")
