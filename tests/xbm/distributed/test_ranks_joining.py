"""Joining and leaving a group, and the heartbeat. Training on several ranks: tests/xbm_app/train/test_several_ranks.py."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from xbm.distributed import ranks, together
from xbm.distributed.ranks import BEAT, REASON, Heartbeat
from xbm.errors import InputError, TerminatedError


class Table(dict):
    """A store that all ranks share."""

    broken = False

    def set(self, key, value):
        if self.broken:
            raise dist.DistNetworkError("connection reset\nby peer")
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def ends(monkeypatch) -> list[int]:
    """All faster, and silence still far longer than a busy machine keeps a thread waiting; ends are only written down."""
    for name, seconds in (("PERIOD", 0.02), ("SILENCE", 1.5), ("GRACE", 0.05)):
        monkeypatch.setattr(ranks, name, seconds)
    codes: list[int] = []
    monkeypatch.setattr(ranks.os, "_exit", codes.append)
    return codes


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_live_ranks_are_left_alone(ends, capfd):
    store = Table()
    with Heartbeat(store, 0, 2), Heartbeat(store, 1, 2):
        until(lambda: all(int(store.get(f"{BEAT}/{rank}", b"0")) > 5 for rank in (0, 1)))
    assert ends == [] and REASON not in store and capfd.readouterr().err == ""
    assert int(store[f"{BEAT}/0"]) > 2


class Terminal:
    """What each write brought, apart: a line in two writes is one that another rank can cut in two."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.write, self.flush = self.writes.append, lambda: None


def test_a_silent_rank_ends_the_others_with_one_line_each(ends, monkeypatch):
    store, terminal = Table(), Terminal()
    monkeypatch.setattr(ranks.sys, "stderr", terminal)
    with Heartbeat(store, 0, 3), Heartbeat(store, 2, 3):  # rank 1 froze before its first beat
        until(lambda: len(ends) == 2)
    assert ends == [2, 2] and len(terminal.writes) == 2
    assert all("rank 1 has been silent" in said and "--resume" in said for said in terminal.writes)
    assert all(said.endswith("\n") and said.count("\n") == 1 for said in terminal.writes)


def test_the_error_of_a_rank_reaches_the_others(ends, capfd):
    store = Table()
    with Heartbeat(store, 0, 2):
        with pytest.raises(ValueError), Heartbeat(store, 1, 2):
            raise ValueError("the disk\nis full")
        until(lambda: bool(ends))
    assert "rank 1: the disk is full" in capfd.readouterr().err and ends == [2]


def test_a_rank_that_fails_by_itself_reports_its_own_error(ends, capfd, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 30.0)
    store = Table()
    store.set(REASON, "rank 1: gone")
    with suppress(KeyError), Heartbeat(store, 0, 2):
        until(lambda: f"{BEAT}/0" in store)  # it has looked
        raise KeyError("an exchange failed")
    time.sleep(0.2)
    assert ends == [] and store[REASON] == b"rank 1: gone"


def test_a_store_that_is_gone_is_an_end_too(ends, capfd):
    store = Table()
    store.broken = True
    with Heartbeat(store, 0, 2):
        until(lambda: bool(ends))
    assert ends == [2] and "the store of the group is gone: connection reset by peer" in capfd.readouterr().err


def test_one_process_joins_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with together() as one:
        assert one.world == 1 and not dist.is_initialized() and signal.getsignal(signal.SIGTERM) is before


def test_sigterm_raises_once():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(TerminatedError):
            ranks._on_sigterm(signal.SIGTERM, None)
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
def test_no_thread_of_the_group_outlives_it(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*launcher, tmp_path / "late.py"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("size", "message"), [("2", "RANK and MASTER_ADDR and MASTER_PORT not set"), ("two", "not set")])
def test_several_processes_without_torchrun_are_one_sentence(monkeypatch, size, message):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(InputError, match=f"WORLD_SIZE is '{size}' .*{message}: start with torchrun"), together():
        pass
