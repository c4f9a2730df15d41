"""Progress on stderr: every item once, a bar on a terminal, a line now and then where there is none."""

import io
import itertools
from types import SimpleNamespace

import pytest

from xbm_app import progress


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def a_second_an_item(monkeypatch):
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(progress, "time", clock)  # the module's alone: a server's loop in this process reads the real one


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("items", [[3, 1, 2], range(0), "ab"])
def test_every_item_comes_once_and_in_order(items, quiet, capsys):
    assert list(progress.track(items, "reading", quiet=quiet)) == list(items)
    assert capsys.readouterr().out == "", "stdout belongs to results"


def test_quiet_says_nothing(capsys, a_second_an_item):
    list(progress.track(range(100), "reading", quiet=True))
    assert capsys.readouterr().err == ""


def test_without_a_terminal_a_line_every_ten_seconds_says_how_long_it_takes(capsys, a_second_an_item):
    list(progress.track(range(25), "reading"))
    assert capsys.readouterr().err.splitlines() == [
        "reading: 9 of 25, about 18 s left",  # 10 s for 9 items, 16 to go
        "reading: 19 of 25, about 6 s left",
    ]


def test_without_a_known_length_the_line_only_counts(capsys, a_second_an_item):
    list(progress.track(iter(range(25)), "reading"))
    assert capsys.readouterr().err.splitlines() == ["reading: 9", "reading: 19"]


def test_a_given_total_serves_where_the_length_is_unknown(capsys, a_second_an_item):
    list(progress.track(iter(range(12)), "reading", total=12))
    assert capsys.readouterr().err == "reading: 9 of 12, about 3 s left\n"


def test_quick_work_prints_nothing(capsys):
    list(progress.track(range(1000), "reading"))
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_shows_count_and_description(monkeypatch):
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    assert list(progress.track([1, 2, 3], "reading pictures")) == [1, 2, 3]
    assert "reading pictures" in screen.getvalue() and "3/3" in screen.getvalue()


@pytest.mark.parametrize("screen", [Screen, io.StringIO])
def test_an_error_of_the_work_passes_through(monkeypatch, screen):
    monkeypatch.setattr("sys.stderr", screen())

    def work():
        for n in progress.track(range(5), "reading"):
            if n == 3:
                raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        work()
