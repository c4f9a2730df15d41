"""One loss step of this checkout beside that of an earlier commit: interleaved, on the same inputs.

    python -m benchmarks.before_after COMMIT     # writes benchmarks/results/cpu-before-after.json

Two processes, one with each version of the package, make the steps of benchmarks/losses.py in turns; which one begins
alternates. A ratio below 1 means that this checkout is faster.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-before-after.json"
LOSSES, SHARES, ROUNDS, CALLS = ("contrastive", "multi_similarity", "triplet"), (0.0, 0.01, 1.0), 31, 3


def worker() -> None:
    """Makes the steps of one case per line that arrives, and answers with the seconds of each."""
    import torch

    import xbm
    from benchmarks.losses import DIM, OURS, scene

    torch.set_num_threads(2)
    print(xbm.__file__, flush=True)
    steps: dict[tuple[str, float], Callable[[], None]] = {}
    for line in sys.stdin:
        loss, share = json.loads(line)
        if (loss, share) not in steps:
            steps.clear()  # one bank at a time
            anchors, labels, bank, row_labels = scene(share, loss)
            memory, v = xbm.CrossBatchMemory(len(bank), DIM), anchors.clone().requires_grad_()
            memory.enqueue(bank, row_labels, torch.arange(len(bank)))
            loss_fn, ids = OURS[loss](engine="streaming"), torch.arange(len(anchors)) + len(bank)

            def step(loss_fn=loss_fn, v=v, labels=labels, memory=memory, ids=ids) -> None:
                v.grad = None
                loss_fn(v, labels, memory, ids=ids).backward()

            steps[loss, share] = step
            step()
        start = time.perf_counter()
        for _ in range(CALLS):
            steps[loss, share]()
        print((time.perf_counter() - start) / CALLS, flush=True)


def asked(process: subprocess.Popen[str], case: tuple[str, float]) -> float:
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(case), file=process.stdin, flush=True)
    return float(process.stdout.readline())


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main(before: str) -> None:
    from benchmarks.measure import machine

    with tempfile.TemporaryDirectory() as folder:
        git("worktree", "add", "--detach", folder, before)
        try:
            processes = {}
            for name, root in {"before": Path(folder), "after": ROOT}.items():
                command = [sys.executable, "-c", "from benchmarks.before_after import worker; worker()"]
                environment = {"PYTHONPATH": f"{root / 'src'}:{ROOT}"}
                process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                assert process.stdout is not None and process.stdout.readline().startswith(str(root / "src"))
                processes[name] = process
            cases = []
            for case in product(LOSSES, SHARES):
                seconds: dict[str, list[float]] = {name: [] for name in processes}
                for turn in range(ROUNDS + 1):
                    for name in sorted(processes, reverse=bool(turn % 2)):
                        seconds[name].append(asked(processes[name], case))
                medians = {f"{name}_ms": 1e3 * median(each[1:]) for name, each in seconds.items()}
                cases.append(
                    {"loss": case[0], "share": case[1], **medians, "ratio": medians["after_ms"] / medians["before_ms"]}
                )
                print(cases[-1], flush=True)
            for process in processes.values():
                process.kill()
        finally:
            git("worktree", "remove", "--force", folder)
    about = {"command": "python -m benchmarks.before_after", "before": git("rev-parse", "--short", before)}
    about |= {"commit": git("rev-parse", "--short", "HEAD"), "date": datetime.now(UTC).date().isoformat(), "machine": machine()}
    RESULTS.write_text(json.dumps({**about, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.before_after COMMIT")
    main(sys.argv[1])
