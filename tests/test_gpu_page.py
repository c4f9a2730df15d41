"""The page of GPU figures is what the recorded results say."""

from benchmarks.gpu_page import PAGE, ROOT, loss_steps, page

PLAIN, GRAPH = "contrastive, few valid, called plainly", "contrastive, few valid, in a graph"
DENSE, PEER = "dense torch, float32", "pytorch-metric-learning CrossBatchMemory"


def test_the_page_is_written_from_the_results():
    assert PAGE.read_text() == page(), "run `python -m benchmarks.gpu_page`"


def test_the_readme_quotes_the_results():
    words = " ".join((ROOT / "README.md").read_text().split())
    _, by_name = loss_steps()["59551x512"]
    plain, graph, dense, peer = (by_name[name]["ms"] for name in (PLAIN, GRAPH, DENSE, PEER))
    assert f"take {plain:.3f} ms called eagerly and {graph:.3f} ms inside a CUDA graph" in words
    assert (
        f"takes {dense:.2f} ms, and the `CrossBatchMemory` of pytorch-metric-learning, called eagerly, {peer:.2f} ms" in words
    )
