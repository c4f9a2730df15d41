"""Generates docs/gpu.md from benchmarks/results/h200-*.json.

python -m benchmarks.gpu_page
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu.md"

HEAD = """# On a GPU

All figures were measured on one NVIDIA H200. The JSON files in `benchmarks/results/` contain them with versions, command and
date; the CSV files contain every repetition. `python -m benchmarks.gpu_page` generates this page from them.

A step of the loss is a forward and a backward pass for 64 anchors.

- "Few valid" means a few thousand valid pairs, as in training; "every valid" is the worst case.
- "In a graph" means inside a CUDA graph, as in training.
- "Called plainly" is limited by the host, not by the GPU. For comparison, the tables show the cost of an autograd function that
  computes nothing on the same machine.
- "Autograd in one thread" uses `torch.autograd.set_multithreading_enabled(False)`, so torch does not hand the backward pass to
  another thread.
- `with_gradient` computes loss and gradient without starting autograd. `anchors.backward(gradient)` then continues into the
  network, for which a training step starts autograd anyway.
"""


UNCHECKED = """
The kernels of SupCon, lifted structure, N-pairs, margin and circle have run under Triton's interpreter only, not on a GPU.
Until they have, `engine="auto"` leaves these losses to the streaming engine. This compares them on hundreds of shapes per loss:

    PYTHONPATH=src:. python3 -m benchmarks.gpu_losses --only check --shapes 12 --seconds 500 --out DIR --kinds sup_con \\
        sup_con_sharp sup_con_learned lifted_structure n_pairs margin margin_averaged margin_balanced circle
"""


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"h200-{name}.json").read_text())


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def source(results: dict[str, Any]) -> str:
    commit = f", commit {results['commit']}" if "commit" in results else ""
    return f"`{results['command']}`, {results['date'][:10]}, torch {results['torch']}, Triton {results['triton']}{commit}.\n"


def loss_steps() -> dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """Returns by size the file and its cases by name. A size that was measured again has its own file, which wins."""
    steps: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {}
    for path in sorted(RESULTS.glob("h200-losses*.json"), key=lambda path: len(path.name)):
        file = json.loads(path.read_text())
        for part in dict.fromkeys(case["part"] for case in file["cases"] if "x" in case["part"]):
            steps[part] = file, {case["case"]: case for case in file["cases"] if case["part"] == part}
    return steps


def losses() -> str:
    """The step of the loss at every size: ours in a graph and called plainly, reading the memory, and others."""
    parts = []
    for part, (file, by_name) in loss_steps().items():
        rows, columns = (int(side) for side in part.split("x"))
        ours, shown = by_name["contrastive, few valid, in a graph"]["ms"], []
        for name, case in by_name.items():
            if "ms" not in case:
                continue
            over = f"{case['over_reading']:.2f}×" if "over_reading" in case else ""
            extra = case.get("MB", by_name.get(f"{name.split(',')[0]}, extra memory", {}).get("MB"))
            shown.append(
                [name, f"{case['ms']:.4f}", over, f"{case['ms'] / ours:.1f}×", "" if extra is None else f"{extra:.1f}"]
            )
        heads = ["", "ms", "relative to reading the bank once", "relative to contrastive in a graph", "extra MB"]
        parts.append(f"### {rows:,} rows of {columns}, bfloat16\n\n{source(file)}\n{table(heads, shown)}")
    return "\n".join(parts)


def checks() -> str:
    results = read("check")
    done = [case for case in results["cases"] if "error" not in case]
    rows = []
    for kind, dtype in sorted({(case["kind"], case["type"]) for case in done}):
        some = [case for case in done if (case["kind"], case["type"]) == (kind, dtype)]
        worst = (f"{max(case[key] for case in some):.1e}" for key in ("loss", "gradient"))
        rows.append([kind, dtype.removeprefix("torch."), str(len(some)), str(sum(case["good"] for case in some)), *worst])
    heads = ["loss", "bank", "shapes", "within bounds", "worst error of the loss", "worst error of the gradient"]
    return source(results) + "\nRandom odd shapes, relative errors.\n\n" + table(heads, rows) + UNCHECKED


def training() -> str:
    results = read("training")
    base = next(case["ms"] for case in results["cases"] if case["case"] == "no memory")
    rows = [
        [case["case"], f"{case['ms']:.2f}", "" if "batch" in case["case"] else f"{100 * (case['ms'] / base - 1):+.1f} %",
         f"{case['peak_gb']:.2f}", f"{case['bank_gb']:.3f}"]
        for case in results["cases"]
    ]  # fmt: skip
    heads = ["GoogLeNet, 224², 512-d", "ms per iteration", "compared with no memory", "peak GB, without the images", "bank GB"]
    return source(results) + "\n" + table(heads, rows)


def schedule() -> str:
    results = read("schedule")
    seconds = results["seconds"]
    text = (
        f"{results['iterations']:,} iterations, batch 64, R_M = 1, {results['images']:,} random images: "
        f"{seconds['in all']:.0f} s from a prepared store to the scores. This includes {seconds['load']:.0f} s for loading, "
        f"{seconds['train']:.0f} s for training (with warm-up, filling the memory, metrics and checkpoints: "
        f"{results['ms_per_iteration']:.2f} ms per iteration) and {seconds['score']:.0f} s for scoring 60,502 images.\n"
    )
    return source(results) + "\n" + text


def evaluation() -> str:
    results = read("evaluation")
    rows = [[case["method"], f"{case['seconds']:.3f}", f"{case['extra_mib']:.0f}"] for case in results["cases"]]
    return source(results) + "\n" + table(["60,502 × 60,502 × 512", "seconds", "peak extra MiB"], rows)


def networks() -> str:
    results = read("network")
    rows = [
        [run["trunk"], f"{run['plain']['ms']:.2f}", f"{run['fused']['ms']:.2f}",
         f"{run['plain']['peak_gb']:.2f}", f"{run['fused']['peak_gb']:.2f}", run["commit"]]
        for run in results["runs"]
    ]  # fmt: skip
    heads = ["batch 64 at 224², one CUDA graph", "torch, ms", "fused, ms", "torch, peak GB", "fused, peak GB", "commit"]
    return f"`{results['command']}`.\n\n" + table(heads, rows)


def page() -> str:
    sections = {
        "How long does a step of the loss take?": losses(),
        "How far are the kernels from float64?": checks(),
        "What does a memory add to a training step?": training(),
        "How long does the paper's schedule take?": schedule(),
        "How long does exact evaluation take?": evaluation(),
        "How much faster are the fused networks?": networks(),
    }
    return HEAD + "".join(f"\n## {title}\n\n{text}" for title, text in sections.items())


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
