"""Joining and leaving a group: nothing for one process; for several see tests/train/test_several_ranks.py."""

import signal

import pytest
import torch.distributed as dist

from xbm.distributed import launch, together
from xbm.errors import InputError


def test_one_process_joins_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with together() as ranks:
        assert ranks.world == 1 and not dist.is_initialized() and signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_torchrun_ends_says_so_once():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(InputError, match="told to end"):
            launch._told_to_end(signal.SIGTERM, None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
