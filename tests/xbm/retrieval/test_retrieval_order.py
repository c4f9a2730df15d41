"""Keys are in the order of similarity, then of the row, and give the similarity back."""

import torch

from xbm.retrieval.order import LOW, ordered_keys, similarity_of


def test_keys_are_ordered_by_similarity_and_then_by_row():
    S = torch.tensor([[0.5, -torch.inf, -0.25, -0.0, 0.0, 0.5, -1.0, 1.0]])
    keys = ordered_keys(S, LOW - torch.arange(8))
    assert keys.argsort(descending=True).tolist() == [[7, 0, 5, 3, 4, 2, 6, 1]]
    assert torch.equal(similarity_of(keys), S)
    assert (LOW - (keys & LOW)).tolist() == [list(range(8))]
