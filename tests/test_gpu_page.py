"""The page of GPU figures is what the recorded results say."""

from benchmarks.gpu_page import PAGE, ROOT, loss_steps, page, read

OURS, THEIRS = "contrastive, few valid, in a graph", "pytorch-metric-learning CrossBatchMemory"


def test_the_page_is_written_from_the_results():
    assert PAGE.read_text() == page(), "run `python -m benchmarks.gpu_page`"


def test_the_readme_quotes_the_results():
    readme = (ROOT / "README.md").read_text()
    (_, by_name), schedule = loss_steps()["59551x512"], read("schedule")
    ours, theirs = (by_name[name]["ms"] for name in (OURS, THEIRS))
    quoted = f"adds {ours:.3f} ms\n  to a step (pytorch-metric-learning: {theirs:.2f})"
    assert quoted in readme and f"takes {schedule['seconds']['in all']:.0f} s" in readme
