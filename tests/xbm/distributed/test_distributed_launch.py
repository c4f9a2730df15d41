"""Joining and leaving a group: nothing for one process; for several see tests/train/test_several_ranks.py."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from xbm.distributed import launch, together
from xbm.errors import TerminatedError


def test_one_process_joins_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with together() as ranks:
        assert ranks.world == 1 and not dist.is_initialized() and signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_torchrun_ends_says_so_once():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(TerminatedError, match="told to end"):
            launch._told_to_end(signal.SIGTERM, None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


LATE = """
import os
from xbm.distributed import together
with together("cpu"):
    import torch.distributed.nn
threads = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
assert not [name for name in threads if "gloo" in name], threads
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are looked up in /proc")
def test_no_thread_of_the_group_is_left_to_meet_the_end_of_the_process(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*launcher, tmp_path / "late.py"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
