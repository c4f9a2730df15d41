"""The package in clean environments: seconds and megabytes of each step, from the wheel to a report and a served search.

    make package && python -m benchmarks.installation      # writes benchmarks/results/installation.json

Each environment starts with torch alone, the newest that uv finds. uv's cache holds every package, so downloads take no time.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.embeddings import commit

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "installation.json"
UV = Path(sys.executable).parent / "uv"
CLASSES, PER_CLASS, SIDE = 20, 10, 64


class Environment:
    """A virtual environment, its size, and the time of each step in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, list[dict[str, Any]]()
        self.base = 0.0
        subprocess.run([UV, "venv", "--quiet", folder], check=True)

    def megabytes(self) -> float:
        return sum(file.lstat().st_size for file in self.folder.rglob("*") if file.is_file()) / 1e6

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        seconds, beyond = time.perf_counter() - begun, self.megabytes() - self.base
        self.steps.append({"step": name, "seconds": round(seconds, 1), "megabytes beyond torch": round(beyond, 1)})
        print(f"  {name}: {seconds:.1f} s, {beyond:,.0f} MB beyond torch", flush=True)

    def install(self, what: str) -> None:
        python = ["--python", str(self.folder), "--compile-bytecode"]
        subprocess.run([UV, "pip", "install", "--quiet", *python, what], check=True)

    def run(self, *words: str) -> str:
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PATH": path}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=self.folder.parent)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        return done.stdout

    def described(self) -> dict[str, Any]:
        command = [UV, "pip", "list", "--quiet", "--format", "json", "--python", self.folder]
        listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        versions = {each["name"]: each["version"] for each in listed}
        return {
            "torch": versions["torch"], "megabytes of torch": round(self.base, 1), "packages": sorted(versions), "steps": self.steps,
        }  # fmt: skip


def with_torch(folder: Path) -> Environment:
    environment = Environment(folder)
    environment.install("torch")
    environment.base = environment.megabytes()
    print(f"{folder.name}: torch takes {environment.base:,.0f} MB")
    return environment


def photos(folder: Path) -> Path:
    """200 coloured pictures of 20 classes."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / f"class {label:02d}").mkdir(parents=True)
        pattern = random.integers(0, 256, (8, 8, 3))
        for number in range(PER_CLASS):
            noisy = np.clip(pattern + random.normal(0, 40, pattern.shape), 0, 255).astype(np.uint8)
            picture = Image.fromarray(noisy).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            picture.save(folder / f"class {label:02d}" / f"{number}.jpg")
    return folder


def readme_example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if "memory.enqueue(" in block)


def served(environment: Environment, index: Path) -> None:
    """Starts `xbm serve`, asks it once, and stops it."""
    command = [environment.folder / "bin" / "xbm", "serve", index, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+:\d+", server.stdout.readline())
        assert address is not None
        with urllib.request.urlopen(f"{address[0]}/api/search?like=1", timeout=60) as answer:
            assert json.load(answer), "no results"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def measure_training(wheel: Path, pictures: Path, run: Path) -> dict[str, Any]:
    environment = with_torch(run.parent / "train")
    with environment.timed("pip install xbm"):
        environment.install(str(wheel))
    with environment.timed("the README's ten lines"):
        environment.run("python", "-c", readme_example())
    with environment.timed("pip install 'xbm[train]'"):
        environment.install(f"xbm[train] @ {wheel.as_uri()}")
    with environment.timed("xbm train --data ./photos (200 images of 20 classes)"):
        environment.run("xbm", "train", "--data", str(pictures), "--out", str(run))
    assert (run / "report.html").exists()
    return environment.described()


def measure_serving(wheel: Path, index: Path) -> dict[str, Any]:
    environment = with_torch(index.parent / "serve")
    with environment.timed("pip install 'xbm[serve]'"):
        environment.install(f"xbm[serve] @ {wheel.as_uri()}")
    with environment.timed("xbm serve INDEX, and one search"):
        served(environment, index)
    described = environment.described()
    assert not {"onnx", "matplotlib", "tensorboard", "scipy", "pyarrow"} & set(described["packages"])
    return described


def main() -> None:
    wheels = sorted((ROOT / "dist").glob("xbm-*.whl"))
    if not wheels:
        raise SystemExit("no wheel in dist/: call `make package` first")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pictures, run, index = photos(folder / "photos"), folder / "run", folder / "index"
        found = {"train": measure_training(wheels[-1], pictures, run)}
        # the index is made elsewhere: in the environment of this program
        command = [sys.executable, "-m", "xbm", "index", str(run), str(pictures), "--out", str(index)]
        subprocess.run(command, check=True, capture_output=True)
        found["serve"] = measure_serving(wheels[-1], index)
    facts = {
        "command": "python -m benchmarks.installation",
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    RESULT.write_text(json.dumps({**facts, "environments": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
