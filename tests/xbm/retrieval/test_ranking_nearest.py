import random

import numpy as np
import pytest
import torch

import tests.xbm.retrieval.retrieval_plain as plain
from xbm.retrieval import nearest, similarity
from xbm.retrieval.ranking import LOW, key_similarities, sort_keys


@pytest.mark.parametrize("work", [similarity.WORK_BYTES, 20_000])
@pytest.mark.parametrize(("queries", "size", "k"), [(1, 1, 1), (3, 64, 5), (33, 70, 70), (20, 129, 7), (5, 9, 30)])
@pytest.mark.parametrize("with_ids", [False, True])
def test_neighbours_equal_a_sort_with_ties_by_index(work, queries, size, k, with_ids, monkeypatch):
    monkeypatch.setattr(similarity, "WORK_BYTES", work)
    rng = random.Random(size)
    rows = [[rng.choice([-1.0, 1.0]) for _ in range(4)] for _ in range(queries + size)]  # cosines in {-1, -.5, 0, .5, 1}
    query, gallery = rows[:queries], rows[queries:]
    ids = [rng.randrange(6) for _ in range(queries)], [rng.randrange(6) for _ in range(size)]
    similarities, indices = nearest(torch.tensor(query), np.array(gallery), k, *(ids if with_ids else ()))
    assert similarities.shape == indices.shape == (queries, min(k, size))
    for q in range(queries):
        left_out = {g for g in range(size) if ids[1][g] == ids[0][q]} if with_ids else set()
        expected = plain.ranking(query[q], gallery, left_out)[:k]
        fill = [-1] * (min(k, size) - len(expected))
        assert indices[q].tolist() == expected + fill
        assert similarities[q].tolist() == [plain.similarity(query[q], gallery[g]) for g in expected] + [-np.inf] * len(fill)


def test_zero_and_minus_zero_are_one_similarity():
    gallery = torch.tensor([[-0.0, -1.0], [0.0, 1.0], [-0.0, 1.0], [0.0, -1.0]])
    assert nearest(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), gallery, 4)[1].tolist() == [[0, 1, 2, 3]] * 2


def test_copies_of_a_row_stay_in_order_though_the_product_rounds_them_differently(monkeypatch):
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: product(a, b) + 1e-6 * torch.arange(b.shape[1]))
    gallery = torch.randn(2, 5)[torch.arange(40) % 2]
    assert nearest(gallery[:1], gallery, 40)[1][0].tolist() == [*range(0, 40, 2), *range(1, 40, 2)]


def test_keys_are_ordered_by_similarity_and_then_by_row():
    S = torch.tensor([[0.5, -torch.inf, -0.25, -0.0, 0.0, 0.5, -1.0, 1.0]])
    keys = sort_keys(S, LOW - torch.arange(8))
    assert keys.argsort(descending=True).tolist() == [[7, 0, 5, 3, 4, 2, 6, 1]]
    assert torch.equal(key_similarities(keys), S)
    assert (LOW - (keys & LOW)).tolist() == [list(range(8))]
