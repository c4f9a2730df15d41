"""One loss step (forward and backward) on a GPU: is it right, how fast is it, and against what. Run once, all is written down:

    PYTHONPATH=src:. python3 benchmarks/gpu_losses.py --out DIR

check.json   every kernel against float64 on a few hundred random odd shapes
times.json   medians of everything, with device, versions, command and date;  times.csv: every repeat
Each part is a process of its own with a time limit, so that one that fails or hangs takes nothing else with it; what is
compiled first, in many processes at once, is ready for the parts that measure. pytorch-metric-learning is measured if it
can be imported: put its folder on PYTHONPATH.
"""

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PARTS = 12  # processes that check
MEASURE = ("59551x512", "59551x128", "1000000x512", "10000000x128", "properties")
WARM = ("warm-512", "warm-128")


def start(arguments: list[str], log: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", *arguments], stdout=log.open("w"), stderr=subprocess.STDOUT)


def finish(running: dict[str, subprocess.Popen], seconds: float) -> dict[str, str]:
    """Waits for all; whoever takes longer is stopped."""
    until, ended = time.time() + seconds, {}
    for name, process in running.items():
        try:
            ended[name] = str(process.wait(timeout=max(1.0, until - time.time())))
        except subprocess.TimeoutExpired:
            process.kill()
            ended[name] = "stopped: took too long"
    return ended


def check(out: Path) -> dict[str, str]:
    running = {}
    for k in range(PARTS):
        arguments = ["benchmarks.gpu_check", "--part", str(k), "--of", str(PARTS), "--out", str(out / f"check-{k}.json")]
        running[f"check-{k}"] = start(arguments, out / f"check-{k}.log")
    for name in WARM:
        running[name] = start(["benchmarks.gpu_times", name, str(out)], out / f"{name}.log")
    return finish(running, 150)


def summarise(out: Path) -> None:
    cases = [case for k in range(PARTS) if (p := out / f"check-{k}.json").exists() for case in json.loads(p.read_text())]
    (out / "check.json").write_text(json.dumps({**about(), "cases": cases}, indent=1))
    done = [c for c in cases if "error" not in c]
    print(f"checked {len(done)} shapes: {sum(c['good'] for c in done)} within bounds; {len(cases) - len(done)} did not run")
    for kind, dtype in sorted({(c["kind"], c["type"]) for c in done}):
        some = [c for c in done if (c["kind"], c["type"]) == (kind, dtype)]
        worst = {key: f"{max(c[key] for c in some):.1e}" for key in ("loss", "gradient", "rows")}
        met = sum(c["valid_negatives"] > 0 for c in some)
        print(f"  {kind:17} {dtype:15} {len(some):3} shapes, {met} with valid negatives; worst relative errors {worst}")
    for case in [c for c in done if not c["good"]][:12] + [c for c in cases if "error" in c][:4]:
        print("  BAD", json.dumps(case)[-900:])


def about() -> dict[str, Any]:
    import torch
    import triton

    found: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__}
    found |= {
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    words = ["DIR" if before == "--out" else word for before, word in zip(sys.argv, sys.argv[1:])]  # where is nobody's business
    return {**found, "command": " ".join(["PYTHONPATH=src:. python3 -m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])}


def collect(out: Path, ended: dict[str, str], seconds: float) -> None:
    cases = [case for part in MEASURE if (p := out / f"{part}.json").exists() for case in json.loads(p.read_text())]
    (out / "times.json").write_text(json.dumps({**about(), "seconds": seconds, "ended": ended, "cases": cases}, indent=1))
    lines = ["part,case,repeat,milliseconds\n"]
    for part in MEASURE:
        if (p := out / f"{part}.csv").exists():
            lines += p.read_text().splitlines(keepends=True)[1:]
    (out / "times.csv").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["check", *MEASURE], help="one part instead of all")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    begun, ended = time.time(), {}
    if a.only in (None, "check"):
        ended |= check(a.out)
        summarise(a.out)
        print(f"--- {time.time() - begun:.0f} s", flush=True)
    for part in MEASURE:
        if a.only in (None, part):
            since = time.time()
            ended |= finish({part: start(["benchmarks.gpu_times", part, str(a.out)], a.out / f"{part}.log")}, 90)
            print((a.out / f"{part}.log").read_text()[-7000:])
            print(f"--- {part}: {ended[part]}, {time.time() - since:.0f} s", flush=True)
            collect(a.out, ended, time.time() - begun)
    print(ended, f"{time.time() - begun:.0f} s")


if __name__ == "__main__":
    main()
