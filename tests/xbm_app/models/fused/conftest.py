"""The kernels run under Triton's interpreter in a process of its own: see test_fuse.py."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED else [
    "test_batch_norm.py", "test_max_pool.py", "test_modules.py", "test_response_norm.py",
]  # fmt: skip

if INTERPRETED:
    from tests.xbm.engine.triton import interpreter_fixes  # noqa: F401


@pytest.fixture
def small_tiles(monkeypatch):
    """So that small maps have many tiles, and programs more than one each."""
    from xbm_app.models.fused import channels_last

    for config in ("REDUCTION", "ELEMENTWISE", "NEIGHBORHOOD"):
        monkeypatch.setattr(channels_last, config, channels_last.TileConfig(1024, 4, 2))
