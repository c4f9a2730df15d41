import time

import pytest
import torch

from xbm_app.search.threads import quickest_threads
from xbm_app.train.load import Embedder, load


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("quick", [1, 2])
def test_the_faster_number_is_chosen_and_given_back(searchable, monkeypatch, two_threads, quick):
    model = load(searchable, device="cpu")
    slowed = lambda self, views: time.sleep(0.001 if torch.get_num_threads() == quick else 0.1)  # noqa: E731
    monkeypatch.setattr(Embedder, "embed_views", slowed)
    with quickest_threads(model, batch=3) as chosen:
        assert chosen == quick == torch.get_num_threads()
    assert torch.get_num_threads() == 2


def test_one_thread_leaves_no_choice(searchable, monkeypatch):
    model = load(searchable, device="cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(Embedder, "embed_views", lambda *_: pytest.fail("measured"))
    with quickest_threads(model, batch=3) as chosen:
        assert chosen == 1
    torch.set_num_threads(before)
