"""The page about text is what the recorded results say, and its intervals are those of scipy."""

import json

import pytest
from scipy import stats

from benchmarks import text_page

FIRST, SECOND = [0.91, 0.93, 0.92, 0.95], [0.90, 0.91, 0.93, 0.91]


def test_the_page_is_written_from_the_results():
    assert text_page.PAGE.read_text() == text_page.page(), "run `python -m benchmarks.text_page`"


@pytest.mark.parametrize("paired", [True, False])
def test_an_interval_is_that_of_the_t_test(paired):
    test = stats.ttest_rel(FIRST, SECOND) if paired else stats.ttest_ind(FIRST, SECOND, equal_var=False)
    low, high = test.confidence_interval(0.95)
    difference, half = text_page.interval(FIRST, SECOND, paired)
    assert (difference - half, difference + half) == pytest.approx((low, high))


def results(gain: float) -> dict:
    settings = {"batch": 32, "per_intent": 4, "update": None, "rows": 2048, "momentum": 0.5}
    score = {"recall@1": 0.9, "map@r": 0.6}
    runs = [
        {"arm": arm, "seed": seed, "seconds": 2.0, "scores": {"50": {"recall@1": 0.95, "map@r": 0.7 + 0.001 * seed + raised}}}
        for seed in (2, 1, 3) for arm in text_page.NAMES for raised in [gain * (arm == "queue") * (1 + 0.01 * seed)]
    ]  # fmt: skip
    trials = [
        {"arm": arm, "rate": rate, "round": 0, "scores": {"25": score, "50": score, "75": score}}
        for arm in text_page.NAMES for rate in (1e-5, 1e-4, 1e-3)
    ]  # fmt: skip
    chosen = {arm: {"settings": settings, "rate": 1e-4, "iterations": 50} for arm in text_page.NAMES}
    return {
        "untouched": {"test": score, "held out": score}, "trials": trials, "chosen": chosen, "runs": runs, "workers": 2,
        "rates": [1e-5, 1e-4, 1e-3], "checkpoints": [25, 50, 75], "device": "a GPU", "torch": "2",
        "date": "2026-01-01", "commit": "",
    }  # fmt: skip


def test_the_page_says_which_differences_are_significant(tmp_path, monkeypatch):
    monkeypatch.setattr(text_page, "RESULTS", tmp_path / "text.json")
    assert text_page.page() == text_page.HEAD
    text_page.RESULTS.write_text(json.dumps(results(0.0)))
    assert "none of these differences is significant" in text_page.page()
    assert "At an end of what was tried" not in text_page.page()
    text_page.RESULTS.write_text(json.dumps(results(0.05)))
    page = text_page.page()
    assert "2 of 10 intervals do not contain 0" in page
    assert "- MAP@R is higher with queue, batch 32 than with in-batch, batch 32." in page
    assert "| in-batch, batch 32 | 0.0001 | 4 utterances per intent | 50 | 95.00 ± 0.00 | 70.20 ± 0.10 | 40 |" in page
