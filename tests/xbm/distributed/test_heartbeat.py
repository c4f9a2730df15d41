"""Ranks that watch each other: a silent one is noticed, last words are passed on, an orderly end is no alarm."""

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from xbm.distributed import heartbeat
from xbm.distributed.heartbeat import BEAT, WORDS, Heartbeat


class Table(dict):
    """A store that all ranks share."""

    broken = False

    def set(self, key, value):
        if self.broken:
            raise RuntimeError("connection reset\nby peer")
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


class Ended(BaseException):
    pass


@pytest.fixture
def ends(monkeypatch) -> list[int]:
    """All faster, and silence still far longer than a busy machine keeps a thread waiting; ends are only written down."""
    for name, seconds in (("PERIOD", 0.02), ("SILENCE", 1.5), ("GRACE", 0.05)):
        monkeypatch.setattr(heartbeat, name, seconds)
    codes: list[int] = []
    monkeypatch.setattr(heartbeat.os, "_exit", codes.append)
    return codes


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_ranks_that_all_live_hear_nothing(ends, capfd):
    store = Table()
    with Heartbeat(store, 0, 2), Heartbeat(store, 1, 2):
        until(lambda: all(int(store.get(f"{BEAT}/{rank}", b"0")) > 5 for rank in (0, 1)))
    assert ends == [] and WORDS not in store and capfd.readouterr().err == ""
    assert int(store[f"{BEAT}/0"]) > 2


class Terminal:
    """What each write brought, apart: a line in two writes is one that another rank can cut in two."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.write, self.flush = self.writes.append, lambda: None


def test_a_silent_rank_ends_the_others_with_one_sentence_each(ends, monkeypatch):
    store, terminal = Table(), Terminal()
    monkeypatch.setattr(heartbeat.sys, "stderr", terminal)
    with Heartbeat(store, 0, 3), Heartbeat(store, 2, 3):  # rank 1 froze before its first beat
        until(lambda: len(ends) == 2)
    assert ends == [2, 2] and len(terminal.writes) == 2
    assert all("rank 1 has been silent" in said and "--resume" in said for said in terminal.writes)
    assert all(said.endswith("\n") and said.count("\n") == 1 for said in terminal.writes)


def test_the_last_words_of_a_rank_reach_the_others(ends, capfd):
    store = Table()
    with Heartbeat(store, 0, 2):
        with pytest.raises(ValueError), Heartbeat(store, 1, 2):
            raise ValueError("the disk\nis full")
        until(lambda: bool(ends))
    assert "rank 1: the disk is full" in capfd.readouterr().err and ends == [2]


def test_who_finds_out_by_itself_is_left_to_say_so(ends, capfd, monkeypatch):
    monkeypatch.setattr(heartbeat, "GRACE", 30.0)
    store = Table()
    store.set(WORDS, "rank 1: gone")
    with suppress(KeyError), Heartbeat(store, 0, 2):
        until(lambda: f"{BEAT}/0" in store)  # it has looked
        raise KeyError("an exchange failed")
    time.sleep(0.2)
    assert ends == [] and store[WORDS] == b"rank 1: gone"


def test_a_store_that_is_gone_is_an_end_too(ends, capfd):
    store = Table()
    store.broken = True
    with Heartbeat(store, 0, 2):
        until(lambda: bool(ends))
    assert ends == [2] and "the store that brought the ranks together is gone (connection reset)" in capfd.readouterr().err
