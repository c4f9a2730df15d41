"""Runs that take a second: a folder of little pictures drawn on the spot, a config for it, and what makes two runs the same."""

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from tests.same import same
from xbm.__main__ import main
from xbm_app.main import main as run_app
from xbm_app.train.config import Config, override
from xbm_app.train.presets import preset

SETTINGS: dict[str, Any] = {
    "device": "cpu", "data.resize": 16, "data.crop": 16, "data.augmentation": "shift", "model.dim": 12, "batch.size": 8,
    "batch.per_class": 2, "optim.iterations": 17, "optim.lr": 1e-3, "optim.decay_at": (13,), "memory.start": 4, "log.every": 5,
    "log.checkpoint_every": 7,
}  # fmt: skip


def draw_photos(root: Path, classes: int = 12, each: int = 6, side: int = 16) -> Path:
    """`root/class_00/0.png` and so on: each class is a pattern of colours, each image a noisy view of it."""
    draw = np.random.default_rng(0)
    for label in range(classes):
        folder = root / f"class_{label:02d}"
        folder.mkdir(parents=True)
        pattern = draw.integers(0, 256, (side, side, 3))
        for number in range(each):
            view = np.clip(pattern + draw.normal(0, 60, pattern.shape), 0, 255).astype(np.uint8)
            Image.fromarray(view).save(folder / f"{number}.png")
    return root


def tiny_config(photos: Path, **changes: Any) -> Config:
    """Changes are written with two underscores for the dot: `memory__ratio=0.5`."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return override(preset("own", trunk="small"), {**SETTINGS, "data.root": str(photos), **named})


def set_options(**changes: Any) -> list[str]:
    """The same settings for the command line."""
    named = {**SETTINGS, **{name.replace("__", "."): value for name, value in changes.items()}}
    text = {name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in named.items()}
    return [word for name, value in text.items() for word in ("--set", f"{name}={value}")]


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def xbm(*words: object) -> Answer:
    """Calls the `xbm` command in this process."""
    return call("xbm", main, words)


def paper(*words: object) -> Answer:
    """Calls `python -m paper` in this process."""
    from paper.__main__ import app

    return call("paper", lambda: run_app(lambda: app), words)


def call(name: str, entry: Callable[[], None], words: tuple[object, ...]) -> Answer:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch("sys.argv", [name, *map(str, words)]), redirect_stdout(out), redirect_stderr(err):
        try:
            entry()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Answer(code, out.getvalue(), err.getvalue())


def differences(one: Path, other: Path) -> list[str]:
    """Where two finished runs differ: all of the last checkpoint, the metrics' bytes, the figures, the examples."""
    found = []
    for name in ("last.pt", "best.pt"):
        a, b = one / "checkpoints" / name, other / "checkpoints" / name
        if a.exists() != b.exists():
            found.append(name)
        elif a.exists():
            found += same(*(torch.load(path, weights_only=True) for path in (a, b)), name)
    if (one / "metrics.csv").read_bytes() != (other / "metrics.csv").read_bytes():
        found.append("metrics.csv")
    results = [json.loads((run / "result.json").read_text()) for run in (one, other)]
    for result in results:
        del result["seconds_per_iteration"], result["finished"]
    found += same(*results, "result.json")
    with np.load(one / "examples.npz") as a, np.load(other / "examples.npz") as b:
        found += [f"examples.npz/{name}" for name in a.files if a[name].tobytes() != b[name].tobytes()]
    return found
