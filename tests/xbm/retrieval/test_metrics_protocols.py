import numpy as np
import pytest
import torch

from tests.xbm.retrieval.retrieval_plain import Labels, Protocol
from xbm.errors import InputError
from xbm.retrieval import evaluate, evaluate_one_per_class, score
from xbm.retrieval.metrics import _one_per_class


def images(labels):
    return Labels(np.asarray(labels))


def test_the_gallery_holds_one_image_of_each_class_and_every_image_gets_its_turn():
    labels = torch.tensor([3, 0, 3, 3, 7, 0, 3])
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([_one_per_class(labels, generator) for _ in range(400)])
    for label in (0, 3, 7):
        assert (draws[:, labels == label].sum(1) == 1).all()
    share = draws.double().mean(0)
    assert share.tolist() == pytest.approx([0.25, 0.5, 0.25, 0.25, 1.0, 0.5, 0.25], abs=0.08)


def test_one_per_class_is_the_mean_over_galleries_drawn_by_hand():
    torch.manual_seed(3)
    labels = torch.arange(60) % 12
    x = torch.randn(12, 6)[labels] + torch.randn(60, 6)
    generator, runs = torch.Generator().manual_seed(5), []
    for _ in range(4):
        chosen = _one_per_class(labels, generator)
        runs.append(evaluate(x[~chosen], labels[~chosen], x[chosen], labels[chosen], ks=(1, 5)))
    scores = evaluate_one_per_class(x, labels, ks=(1, 5), repeats=4, seed=5)
    for name in ("recall@1", "recall@5", "map"):
        values = [run[name] for run in runs]
        assert scores[name] == pytest.approx(np.mean(values))
        assert scores[f"{name}_std"] == pytest.approx(np.std(values, ddof=1))
        assert scores[f"{name}_std"] > 0
    assert scores["queries"] == 48
    assert scores == evaluate_one_per_class(x.numpy(), labels.numpy(), ks=(1, 5), repeats=4, seed=5)
    assert scores != evaluate_one_per_class(x, labels, ks=(1, 5), repeats=4, seed=6)


def test_one_per_class_takes_text_labels_and_refuses_what_leaves_no_query():
    x = torch.eye(3)
    assert evaluate_one_per_class(x, ["a", "b", "a"], repeats=1)["recall@1_std"] == 0
    with pytest.raises(InputError, match="every class has only one image"):
        evaluate_one_per_class(x, [0, 1, 2])
    with pytest.raises(InputError, match="repeats must be"):
        evaluate_one_per_class(x, [0, 1, 0], repeats=0)


def test_score_leaves_one_out_without_a_gallery():
    labels = [0, 0, 1, 1, 1]
    x = torch.randn(5, 3)
    assert score(Protocol("mini", images(labels), (1, 2)), x) == evaluate(x, labels, ks=(1, 2))


@pytest.mark.filterwarnings("ignore:1 of 7 queries have no relevant item")
def test_a_query_is_not_compared_with_its_own_label_and_group():
    torch.manual_seed(1)
    query, gallery = images([0, 1, 1, 5, 0]), images([1, 0, 1, 0, 5, 0, 1])
    query.groups, gallery.groups = np.array([3, 0, 3, 7, 0]), torch.tensor([0, 3, 3, 0, 0, 3, 7])
    x, g = torch.randn(5, 4), torch.randn(7, 4)
    ids = [10 * label + group for label, group in zip(query.labels, query.groups)]
    gallery_ids = [10 * label + group for label, group in zip(gallery.labels, gallery.groups.numpy())]
    assert score(Protocol("re-id", query, (1, 3), gallery), x, g) == evaluate(
        x, query.labels, g, gallery.labels, ids, gallery_ids, ks=(1, 3)
    )
    assert score(Protocol("alone", gallery, (1,)), g) == evaluate(g, gallery.labels, ids=gallery_ids, ks=(1,))


def test_score_names_both_protocols_of_vehicles():
    torch.manual_seed(0)
    labels = [0, 0, 0, 1, 1, 1, 2, 2]
    x = torch.randn(8, 3)
    scores = score(Protocol("mini", images(labels), (1, 5), one_per_class=6), x)
    alone, other = evaluate(x, labels, ks=(1, 5)), evaluate_one_per_class(x, labels, ks=(1, 5), repeats=6)
    assert scores == alone | {f"one_per_class/{name}": value for name, value in other.items()}


def test_score_searches_the_gallery_and_counts_both_sides():
    torch.manual_seed(0)
    protocol = Protocol("mini", images([0, 1, 2]), (1,), gallery=images([2, 1, 0, 0]))
    q, g = torch.randn(3, 4), torch.randn(4, 4)
    assert score(protocol, q, g) == evaluate(q, [0, 1, 2], g, [2, 1, 0, 0], ks=(1,))
    with pytest.raises(InputError, match="mini has a gallery of 4 images"):
        score(protocol, q)
    with pytest.raises(InputError, match="mini has 4 gallery images, got 3"):
        score(protocol, q, g[:3])
    with pytest.raises(InputError, match="mini has 3 query images, got 4"):
        score(protocol, g, g)
    with pytest.raises(InputError, match="mini has no gallery"):
        score(Protocol("mini", images([0, 0]), (1,)), q[:2], g)
