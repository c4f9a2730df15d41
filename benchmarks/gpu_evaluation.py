"""Exact evaluation on a GPU at the size of Stanford Online Products' test set: R@1, 10, 100, 1000, R-precision, MAP@R and mAP.

    PYTHONPATH=src:. python3 -m benchmarks.gpu_evaluation --out DIR

evaluation.json   medians, and that of the bare float32 product, with device, versions, command and date
evaluation.csv    every repeat
"""

import argparse
import csv
import json
from pathlib import Path

from benchmarks.gpu_losses import about
from benchmarks.retrieval import gpu_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    rows = gpu_rows()
    with (a.out / "evaluation.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "repeat", "seconds"])
        for row in rows:
            writer.writerows([row["method"], k, f"{seconds:.6f}"] for k, seconds in enumerate(row.pop("repeats")))
    (a.out / "evaluation.json").write_text(json.dumps({**about(), "cases": rows}, indent=1))
    print(rows)


if __name__ == "__main__":
    main()
