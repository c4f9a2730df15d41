"""Progress on stderr: every item once, a bar on a terminal, a line now and then where there is none."""

import io
import itertools
import math
from types import SimpleNamespace

import pytest

from xbm_app import progress
from xbm_app.progress import Console
from xbm_app.train.metrics import one_line


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


TOTAL = 40
ROW = {
    "loss": 0.1234, "valid_negatives_batch": 12.4, "valid_negatives_memory": 345.6, "drift_10": 0.01, "drift_100": 0.25,
    "drift_1000": math.nan, "recall@1": 0.6543,
}  # fmt: skip


def test_a_line_tells_speed_time_left_loss_negatives_drift_and_recall(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with Console(TOTAL, start=10, quiet=False) as console:
        console.text = one_line(ROW)
        now = 105.0
        console.advance(15)
        assert capsys.readouterr().err == ""  # a line every ten seconds
        now = 110.0
        console.advance(20)
    assert console.speed == 1.0  # of this session: the ten before were another's
    line = capsys.readouterr().err.strip()
    assert line == "20/40 · 1.0 it/s · 20 s left · loss 0.123 · negatives 12 batch / 346 memory · drift(100) 0.250 · R@1 65.4"


def test_what_is_no_iteration_is_shown_too_and_left_out_of_the_speed(monkeypatch, capsys):
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(progress, "time", clock)
    with Console(TOTAL, start=0, quiet=False) as console:
        images = console.track(iter("abcd"), "filling the memory", 4)
        for image in images:
            now += 6.0
            if image == "c":
                break
        images.close()  # full before the last one
        assert capsys.readouterr().err == "filling the memory: 2 of 4, about 12 s left\n"
        now += 9.0
        console.advance(18)
        assert console.speed == 2.0 and capsys.readouterr().err == ""  # ten seconds from the end of the filling
        now += 1.0
        console.advance(20)
        assert capsys.readouterr().err.startswith("20/40 · 2.0 it/s · 10 s left")


def test_a_terminal_shows_it_under_the_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Console(TOTAL, start=0, quiet=False) as console:
        seen = [console.text for _ in console.track(range(3), "filling the memory", 3)]
        assert console.text == ""
    assert seen[0] == "filling the memory: 0 of 3" and seen[2].startswith("filling the memory: 2 of 3, about ")


def test_without_memory_nothing_is_said_of_it():
    row = {"loss": 1.0, "valid_negatives_batch": 3.0, "valid_negatives_memory": math.nan}
    assert one_line(row) == "loss 1 · negatives 3 batch"


def test_a_quiet_console_prints_nothing(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with Console(TOTAL, 0, quiet=True) as console:
        console.say("scoring")
        now = 60.0
        console.advance(30)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_and_sentences_above_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    with Console(TOTAL, 0, quiet=False) as console:
        console.text = one_line(ROW)
        console.advance(40)
        console.say("warning: [collapse] ahead")
    shown = capsys.readouterr().err
    for part in ("40/40", "it/s", "negatives 12 batch / 346 memory", "R@1 65.4", "warning: [collapse] ahead"):
        assert part in shown


@pytest.fixture
def notebook(monkeypatch, a_second_an_item):
    shown = []
    line = SimpleNamespace(show=lambda *what: shown.append(what))
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "NotebookLine", lambda: line)
    return shown


def test_in_a_notebook_a_line_is_replaced_and_nothing_is_red(notebook, capsys):
    assert list(progress.track("abc", "reading")) == ["a", "b", "c"]
    assert notebook == [(f"reading: {n} of 3", n, 3) for n in range(4)]
    notebook.clear()
    with Console(total=4, start=0, quiet=False) as console:
        console.say("a sentence")
        console.text = "loss 0.5"
        console.advance(2)
    assert notebook == [("2/4 · 2.0 it/s · 1 s left · loss 0.5", 2, 4)]
    assert capsys.readouterr() == ("a sentence\n", "")


def test_in_a_notebook_quiet_says_nothing(notebook, capsys):
    list(progress.track("abc", "reading", quiet=True))
    with Console(total=4, start=0, quiet=True) as console:
        console.say("a sentence")
        console.advance(2)
    assert notebook == [] and capsys.readouterr() == ("", "")


def test_a_test_is_no_notebook():
    assert not progress.in_notebook()
