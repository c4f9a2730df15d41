"""Shared by the tests of the paper's experiments."""

import pytest


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small files are written here; that they are synced is tested elsewhere."""
    monkeypatch.setattr("xbm.train.files._sync", lambda path: None)
