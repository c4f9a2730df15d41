"""One loss step (forward and backward) on a GPU: correctness, speed and alternatives.

    PYTHONPATH=src:. python3 -m benchmarks.gpu_losses --out DIR

check.json   every kernel compared with float64 on a few hundred random odd shapes
times.json   medians of all cases, with device, versions, command and date
times.csv    every repeat

Each part is a separate process with a time limit, so that a failure or hang does not affect the others. Kernels are compiled
first, in many processes at once. pytorch-metric-learning is measured if it can be imported (add its folder to PYTHONPATH).
"""

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PARTS = 12  # processes of the check
MEASURE = ("59551x512", "59551x128", "1000000x512", "10000000x128", "properties")
WARM = ("warm-512", "warm-128")


def start(arguments: list[str], log: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", *arguments], stdout=log.open("w"), stderr=subprocess.STDOUT)


def finish(running: dict[str, subprocess.Popen], seconds: float) -> dict[str, str]:
    """Waits for all processes and kills those that exceed the time limit."""
    until, ended = time.time() + seconds, {}
    for name, process in running.items():
        try:
            ended[name] = str(process.wait(timeout=max(1.0, until - time.time())))
        except subprocess.TimeoutExpired:
            process.kill()
            ended[name] = "stopped: took too long"
    return ended


def check(out: Path, options: list[str], seconds: float, warm: bool) -> dict[str, str]:
    running = {}
    for k in range(PARTS):
        part = ["--part", str(k), "--of", str(PARTS), "--out", str(out / f"check-{k}.json")]
        running[f"check-{k}"] = start(["benchmarks.gpu_check", *part, *options], out / f"check-{k}.log")
    for name in WARM if warm else ():
        running[name] = start(["benchmarks.gpu_times", name, str(out)], out / f"{name}.log")
    return finish(running, seconds + 40)


def summarise(out: Path) -> None:
    cases = [case for k in range(PARTS) if (p := out / f"check-{k}.json").exists() for case in json.loads(p.read_text())]
    (out / "check.json").write_text(json.dumps({**about(), "cases": cases}, indent=1))
    done = [c for c in cases if "error" not in c]
    print(f"checked {len(done)} shapes: {sum(c['good'] for c in done)} within bounds; {len(cases) - len(done)} did not run")
    for kind, dtype in sorted({(c["kind"], c["type"]) for c in done}):
        some = [c for c in done if (c["kind"], c["type"]) == (kind, dtype)]
        worst = {key: f"{max(c[key] for c in some):.1e}" for key in ("loss", "gradient", "rows", "slope")}
        met = sum(c["valid_negatives"] > 0 for c in some)
        print(f"  {kind:17} {dtype:15} {len(some):3} shapes, {met} with valid negatives; worst relative errors {worst}")
    for case in [c for c in done if not c["good"]][:12] + [c for c in cases if "error" in c][:4]:
        print("  BAD", json.dumps(case)[-900:])


def about() -> dict[str, Any]:
    import torch
    import triton

    versions: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    words = ["DIR" if before == "--out" else word for before, word in zip(sys.argv, sys.argv[1:])]  # without local paths
    return {**versions, "command": " ".join(["PYTHONPATH=src:. python3 -m", f"benchmarks.{Path(sys.argv[0]).stem}", *words])}


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
    parser.add_argument("--only", choices=["check", *MEASURE], help="run one part instead of all")
    parser.add_argument("--kinds", nargs="+", default=[], help="what gpu_check compares; default: all")
    parser.add_argument("--shapes", type=int, default=4, help="how many of each width, type and kind it compares")
    parser.add_argument("--seconds", type=float, default=110, help="how long it may take")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    begun, ended = time.time(), {}
    if a.only in (None, "check"):
        options = ["--shapes", str(a.shapes), "--seconds", str(a.seconds), *(["--kinds", *a.kinds] if a.kinds else [])]
        ended |= check(a.out, options, a.seconds, a.only is None)
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
