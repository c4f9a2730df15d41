"""Executes one run, from its config to its result file: trains or resumes training, measures, and writes the figures."""

import base64
import gc
import hashlib
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paper.experiments import MEASURES, TIMINGS
from paper.experiments.drift import CROSS_ENTROPY, classify, snapshot, stages
from paper.record import NAMED, Records, folder_name, identity, may_go_on
from paper.study import Task
from xbm.errors import DivergedError, unknown
from xbm_app.files import read_checkpoint, replacing
from xbm_app.report.run_folders import read_columns
from xbm_app.train.config import Config, override
from xbm_app.train.dataset import read_run
from xbm_app.train.finish import device_name
from xbm_app.train.state import RunState, pick_device


def execute(task: Task, config: Config, runs: Path, records: Records, beside: int = 1) -> Path:
    """Makes the run and its result file.

    Args:
        task: the run to make.
        config: its config with this machine's paths.
        runs: where run folders are created; interrupted runs are resumed.
        beside: number of runs that share the machine, because it affects their times.
    """
    settings = identity(task.config)
    folder = runs / folder_name(task.config)
    begun = time.monotonic()
    if task.alone:  # a timed run must not be a resumed one
        shutil.rmtree(folder, ignore_errors=True)
    resumed = (folder / "checkpoints" / "last.pt").exists()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    values: dict[str, Any] = {"config": settings}
    try:
        values |= _trained(task, config, folder)
    except DivergedError as error:
        # divergence at some learning rate is a result, and is not repeated
        values["failed"] = f"iteration {error.iteration}: the loss is not finite"
    finally:
        gc.collect()  # the next run of this process needs the memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    path = records.write({
        **values,
        "weights": weights_of(config),
        "chosen": task.chosen,
        "split": f"{task.config.data.holdout:.0%} of the training classes, held out" if task.config.data.holdout else "test",
        "precision": precision_of(config),
        "wall_seconds": None if resumed else round(time.monotonic() - begun, 1),  # of the whole run
        "runs_beside": beside - 1,
        "versions": versions(),
        "device": device_name(pick_device(config.device)),
        "date": time.strftime("%Y-%m-%d"),
    })  # fmt: skip
    if not may_go_on(task.config) or values.get("failed"):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # hundreds of megabytes a run, and the figures are kept
    return path


def _trained(task: Task, config: Config, folder: Path) -> dict[str, Any]:
    if config.loss.name == CROSS_ENTROPY:
        return classify(config, folder)
    from xbm_app.train.loop import train

    result: dict[str, Any] = {}
    for stop in stages(config, task.measures):
        kept, last = snapshot(folder, config.optim.iterations - stop), folder / "checkpoints" / "last.pt"
        if kept.exists():
            continue
        if last.exists() and read_checkpoint(last)["step"] > stop:  # trained past this model: start again
            shutil.rmtree(folder)
        begun = (folder / "config.yaml").exists()
        result = train(override(config, {"optim.iterations": stop}), folder, resume=begun, quiet=True)
        if stop < config.optim.iterations:
            with replacing(kept) as beside:
                shutil.copy(last, beside)
    return {
        "data": result["data"],
        "iterations": result["iterations"],
        "scores": {protocol: _rounded(scores) for protocol, scores in result["protocols"].items()},
        "recall_curve": [round(value, 5) for value in result["curve"]],
        "hits": None if config.data.holdout else hits(config, folder),
        "curves": read_columns(folder),
        "seconds_per_iteration": result["seconds_per_iteration"],
        "peak_memory_bytes": result.get("peak_memory_bytes"),
        "notes": [text for _, text in result["notes"]],
        "measures": {each: measure(each, config, folder) for each in task.measures},
    }


def measure(name: str, config: Config, folder: Path) -> Any:
    """Measures something on a finished run, for its result file."""
    if name in TIMINGS:
        return TIMINGS[name](config, folder)
    if name not in MEASURES:
        raise unknown("measure", name, [*MEASURES, *TIMINGS])
    run = RunState(config, read_run(config, folder), folder)
    run.restore()
    run.model.eval()
    return MEASURES[name](run)


def hits(config: Config, folder: Path) -> dict[str, Any]:
    """Which queries of the first protocol retrieve an image of their own class first: bit k, in the order of the data set, is
    query k (most significant bit first), so that classes can be drawn with all their queries."""
    protocol = read_run(config, folder).protocols[0]
    labels = np.asarray(protocol.query.labels)
    searched = labels if protocol.gallery is None else np.asarray(protocol.gallery.labels)
    with np.load(folder / "examples.npz", allow_pickle=False) as examples:
        right = searched[examples["neighbours"][:, 0]] == labels
    packed = base64.b64encode(np.packbits(right).tobytes()).decode()
    return {"protocol": protocol.name, "queries": len(right), "rank_1": packed}


def _rounded(scores: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in scores.items()}


def weights_of(config: Config) -> dict[str, str]:
    """The initial weights of the trunk: a file by its name and digest."""
    path = Path(config.model.weights)
    if config.model.weights in NAMED or not path.is_file():
        return {"name": path.name}
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def precision_of(config: Config) -> str:
    if config.optim.precision != "auto":
        return config.optim.precision
    return "bf16" if pick_device(config.device).type == "cuda" else "fp32"


def versions() -> dict[str, str]:
    from xbm import __version__

    return {"xbm": __version__, "python": platform.python_version(), "torch": torch.__version__}
