import numpy as np
import pytest
import torch

from xbm.errors import InputError
from xbm.retrieval import cumulative, evaluate, nearest

X = torch.eye(4)
Y = [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embeddings": torch.zeros(4)}, r"embeddings must have shape .* got \(4,\)"),
        ({"embeddings": torch.zeros(0, 4)}, r"embeddings must have shape .* got \(0, 4\)"),
        ({"embeddings": torch.zeros(4, 0)}, r"embeddings must have shape .* got \(4, 0\)"),
        ({"embeddings": torch.eye(4, dtype=torch.int64)}, "embeddings must be floats, got torch.int64"),
        ({"embeddings": "rows"}, "embeddings must be a float array"),
        ({"embeddings": None}, "embeddings must be a float array .* got NoneType"),
        ({"embeddings": [[1.0, 0.0], [1.0]]}, "embeddings must be a float array"),
        ({"embeddings": torch.tensor([[1, 2.0], [0, float("nan")], [1, 0], [0, 1]])}, "NaN or infinity"),
        ({"embeddings": torch.tensor([[1, 2.0], [0, float("-inf")], [1, 0], [0, 1]])}, "NaN or infinity"),
        ({"labels": [0, 0, 1]}, "3 labels for 4 rows"),
        ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, r"labels must have shape .* got \(4, 1\)"),
        ({"labels": [0.0, 0.5, 1.0, 1.0]}, "labels must be integers or text"),
        ({"labels": torch.zeros(4)}, "labels must be integers or text, got torch.float32"),
        ({"labels": ["a", None, "b", "c"]}, "labels must be integers or text"),
        ({"labels": 3}, "labels must be integers or text"),
        ({"ids": [0, 1]}, "2 ids for 4 rows"),
        ({"gallery": X}, "both gallery and gallery_labels, or neither"),
        ({"gallery_labels": Y}, "both gallery and gallery_labels, or neither"),
        ({"gallery_ids": Y}, "gallery_ids needs a gallery"),
        ({"gallery": X, "gallery_labels": Y, "ids": Y}, "both ids and gallery_ids, or neither"),
        ({"gallery": X, "gallery_labels": Y, "gallery_ids": Y}, "both ids and gallery_ids, or neither"),
        ({"gallery": torch.eye(3), "gallery_labels": [0, 0, 1]}, "queries are 4-d but the gallery is 3-d"),
        ({"gallery": X, "gallery_labels": [0]}, "1 gallery_labels for 4 rows"),
        ({"gallery": X, "gallery_labels": list("abab")}, "must both be integers or both be text"),
        ({"gallery": X * float("inf"), "gallery_labels": Y}, "gallery contains NaN or infinity"),
        (
            {"gallery": X, "gallery_labels": Y, "ids": Y, "gallery_ids": [1]},
            "1 gallery_ids for 4 rows",
        ),
        ({"ks": (1, 0)}, "K of Recall@K must be .* got 0"),
        ({"ks": (2.5,)}, "K of Recall@K must be .* got 2.5"),
        ({"ks": (True,)}, "K of Recall@K must be .* got True"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        evaluate(**({"embeddings": X, "labels": Y} | arguments))


def test_other_functions_check_too():
    with pytest.raises(InputError, match="up_to must be"):
        cumulative(X, Y, up_to=0)
    with pytest.raises(InputError, match="k must be"):
        nearest(X, X, 0)
    with pytest.raises(InputError, match="both query_ids and gallery_ids, or neither"):
        nearest(X, X, 1, query_ids=Y)
    with pytest.raises(InputError, match="queries are 4-d but the gallery is 3-d"):
        nearest(X, torch.eye(3), 1)
    with pytest.raises(InputError, match="2 query_ids for 4 rows"):
        nearest(X, X, 1, query_ids=[1, 2], gallery_ids=Y)


def test_labels_may_be_text_and_keep_one_numbering_over_both_sides():
    expected = evaluate(X + 0.1, [5, 6, 5, 6], X, [6, 5, 5, 6], ks=(1, 2))
    for kind in (list, np.array, lambda names: np.array(names, dtype=object), lambda names: np.array(names, dtype="S3")):
        assert evaluate(X + 0.1, kind(list("abab")), X, kind(list("baab")), ks=(1, 2)) == expected


def test_labels_beyond_32_bits_stay_apart():
    # Truncated to 32 bits all four would be equal.
    labels = np.array([0, 2**32, 0, 2**32], dtype=np.uint64) + np.uint64(2**63)
    assert evaluate([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]], labels)["r_precision"] == 1
    assert evaluate([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], labels, ks=(1,))["recall@1"] == 0


def test_ks_may_come_from_numpy():
    assert list(evaluate(X, Y, ks=np.array([1, 3])))[:2] == ["recall@1", "recall@3"]
