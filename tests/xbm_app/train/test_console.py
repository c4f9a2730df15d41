import math
from types import SimpleNamespace

from xbm_app import progress
from xbm_app.train import console as console_module
from xbm_app.train.config import Config, override
from xbm_app.train.console import Console

CONFIG = override(Config(), {"optim.iterations": 40})
ROW = {
    "loss": 0.1234, "valid_negatives_batch": 12.4, "valid_negatives_memory": 345.6, "drift_10": 0.01, "drift_100": 0.25,
    "drift_1000": math.nan, "recall@1": 0.6543,
}  # fmt: skip


def test_a_line_tells_speed_time_left_loss_negatives_drift_and_recall(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=lambda: now))
    with Console(CONFIG, start=10, quiet=False) as console:
        console.show(ROW)
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
    for module in (console_module, progress):
        monkeypatch.setattr(module, "time", clock)
    with Console(CONFIG, start=0, quiet=False) as console:
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
    with Console(CONFIG, start=0, quiet=False) as console:
        seen = [console.text for _ in console.track(range(3), "filling the memory", 3)]
        assert console.text == ""
    assert seen[0] == "filling the memory: 0 of 3" and seen[2].startswith("filling the memory: 2 of 3, about ")


def test_without_memory_nothing_is_said_of_it():
    console = Console(CONFIG, 0, quiet=True)
    console.show({"loss": 1.0, "valid_negatives_batch": 3.0, "valid_negatives_memory": math.nan})
    assert console.text == "loss 1 · negatives 3 batch"


def test_quiet_says_nothing(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=lambda: now))
    with Console(CONFIG, 0, quiet=True) as console:
        console.say("scoring")
        now = 60.0
        console.advance(30)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_and_sentences_above_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    with Console(CONFIG, 0, quiet=False) as console:
        console.show(ROW)
        console.advance(40)
        console.say("warning: [collapse] ahead")
    shown = capsys.readouterr().err
    for part in ("40/40", "it/s", "negatives 12 batch / 346 memory", "R@1 65.4", "warning: [collapse] ahead"):
        assert part in shown
