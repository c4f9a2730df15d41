"""The page of GPU figures is what the recorded results say."""

from benchmarks.gpu_page import PAGE, ROOT, loss_steps, page, read

OURS, THEIRS = "contrastive, few valid, in a graph", "pytorch-metric-learning CrossBatchMemory"


def test_the_page_is_written_from_the_results():
    assert PAGE.read_text() == page(), "run `python -m benchmarks.gpu_page`"


def test_the_readme_quotes_the_results():
    readme = (ROOT / "README.md").read_text()
    (_, by_name), schedule = loss_steps()["59551x512"], read("schedule")
    ours, theirs = (by_name[name]["ms"] for name in (OURS, THEIRS))
    words = " ".join(readme.split())
    assert f"both take {ours:.3f} ms against 59,551 × 512 rows in a recorded step" in words
    assert f"(pytorch-metric-learning: {theirs:.2f})" in words and f"takes {schedule['seconds']['in all']:.0f} s" in words
