"""From run folders to a report: reads what training wrote, picks what to show, opens the pictures."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from xbm.errors import InputError
from xbm_app.data.images import Dataset, ImageSet
from xbm_app.report.page import write_report
from xbm_app.report.view import SERIES, Doubtful, Match, Mined, Query, RunView, Trace
from xbm_app.train import config as configs
from xbm_app.train.dataset import read_run
from xbm_app.train.metrics import read_metrics

SHOWN = 20  # queries a page, the same in every run
CHOSEN = "Drawn at random from the queries whose nearest image is wrong in at least one of these runs."


def report_runs(folders: Sequence[Path], out: Path, groups: Sequence[str] | None = None) -> Path:
    """Writes one page about these runs; runs of one group are seeds of the same setting."""
    settings = [configs.load(folder / "config.yaml") for folder in folders]
    names = list(groups) if groups is not None else [_group(config) for config in settings]
    shown = _first_seeds(names, settings)
    examples = {k: _examples(folders[k]) for k in shown}
    datasets = {k: _open_data(settings[k], folders[k]) for k in shown}
    picked = _pick(examples, datasets)
    views = []
    for k, (folder, config, group) in enumerate(zip(folders, settings, names)):
        pictures: dict[str, Any] = {}
        dataset, found = datasets.get(k), examples.get(k)
        if dataset is not None and found:
            with suppress(InputError):  # images that have vanished since: the page goes without pictures of this run
                pictures = {
                    "queries": _queries(found, dataset, picked),
                    "chosen": CHOSEN,
                    "mined": _mined(found, dataset),
                    "doubtful": _doubtful(found, dataset),
                }
        views.append(_view(folder, config, group, pictures))
    return write_report(views, out, title=_title(settings[0].data.name))


def read_result(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "result.json").read_text())
    except FileNotFoundError:
        raise InputError(f"{folder} holds no finished run: finish it with `xbm train --resume {folder}`") from None


def _title(data: str) -> str:
    return f"What the memory does: {data}"


def _group(config: configs.Config) -> str:
    memory = f"memory R_M {config.memory.ratio:g}, {config.memory.update}" if config.memory.ratio else "no memory"
    return f"{config.loss.name}, {config.reduction}, {memory}"


def _first_seeds(names: Sequence[str], settings: Sequence[configs.Config]) -> list[int]:
    """One run of each group: pictures of all seeds would make the page heavy and say no more."""
    first: dict[str, int] = {}
    for k, (name, config) in enumerate(zip(names, settings)):
        if name not in first or config.seed < settings[first[name]].seed:
            first[name] = k
    return sorted(first.values())


def _examples(folder: Path) -> dict[str, np.ndarray]:
    path = folder / "examples.npz"
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _open_data(config: configs.Config, folder: Path) -> Dataset | None:
    """The run's data, or None where it has moved away: the report then goes without pictures."""
    try:
        return read_run(config, folder)
    except InputError:
        return None


def _right(examples: dict[str, np.ndarray], dataset: Dataset) -> np.ndarray:
    """(Q, k) bool: whether each retrieved image is of the query's class."""
    protocol = dataset.protocols[0]
    gallery = protocol.gallery or protocol.query
    return np.asarray(gallery.labels)[examples["neighbours"]] == np.asarray(protocol.query.labels)[:, None]


def _pick(examples: dict[int, dict], datasets: dict[int, Dataset | None]) -> np.ndarray:
    """Queries to show, the same for all runs: at random among those that some run gets wrong, since the others look alike."""
    firsts = [_right(found, dataset)[:, 0] for found, dataset in zip(examples.values(), datasets.values()) if found and dataset]
    if not firsts or len({len(first) for first in firsts}) > 1:
        return np.empty(0, np.int64)
    wrong_somewhere = np.flatnonzero(~np.all(firsts, axis=0))
    return np.random.default_rng(0).permutation(wrong_somewhere)[:SHOWN]


def _queries(examples: dict[str, np.ndarray], dataset: Dataset, picked: np.ndarray) -> list[Query]:
    protocol = dataset.protocols[0]
    gallery = protocol.gallery or protocol.query
    right = _right(examples, dataset)
    found = []
    for q in picked[picked < len(right)]:
        matches = [
            Match(gallery.open(int(j)), float(s), bool(ok))
            for j, s, ok in zip(examples["neighbours"][q], examples["similarities"][q], right[q])
        ]
        found.append(Query(protocol.query.describe(int(q)), protocol.query.open(int(q)), matches))
    return found


def _mined(examples: dict[str, np.ndarray], dataset: Dataset) -> list[Mined]:
    if not examples.get("mined_memory", np.empty(0)).size:
        return []
    train = dataset.train
    found = []
    for k, anchor in enumerate(examples["mined_anchor"]):
        lists = {name: _matches(train, examples, f"mined_{name}", k) for name in ("batch", "memory")}
        positive = train.open(int(examples["mined_positive"][k]))
        found.append(Mined(train.open(int(anchor)), positive, lists["batch"], lists["memory"]))
    return found


def _doubtful(examples: dict[str, np.ndarray], dataset: Dataset) -> list[Doubtful]:
    train = dataset.train
    found = []
    for k, image in enumerate(examples.get("doubted_image", np.empty(0)).tolist()):
        label, nearest = (str(train.class_names[c]) for c in (train.labels[image], examples["doubted_nearest"][k]))
        own, other = (_matches(train, examples, f"doubted_{name}", k) for name in ("own", "other"))
        found.append(Doubtful(train.describe(image), train.open(image), label, nearest, own, other))
    return found


def _matches(images: ImageSet, examples: dict[str, np.ndarray], name: str, k: int) -> list[Match]:
    """The k-th row of those kept under this name, without what fills it up."""
    return [Match(images.open(int(j)), float(s)) for j, s in zip(examples[name][k], examples[f"{name}_s"][k]) if j >= 0]


def _view(folder: Path, config: configs.Config, group: str, pictures: dict[str, Any]) -> RunView:
    result = read_result(folder)
    rows = read_metrics(folder / "metrics.csv")
    series = {name: np.array([row[name] for row in rows]) for name in SERIES}
    evaluations = [(int(row["step"]), row["recall@1"]) for row in rows if row["recall@1"] == row["recall@1"]]
    per_iteration = result.get("seconds_per_iteration")
    summary = {
        "trunk": f"{config.model.trunk}, {config.model.dim}-d",
        "batch": f"{config.batch.size}, {config.batch.sampler}",
        "loss": f"{config.loss.name}, {config.reduction}",
        "memory": _group(config).split(", ", 2)[2],
        "optimizer": f"Adam, lr {config.optim.lr:g}, {config.optim.iterations} iterations",
    }
    return RunView(
        name=folder.name,
        group=group,
        loss=config.loss.name,
        reduction=config.reduction if config.loss.name in ("contrastive", "triplet", "margin") else "",
        memory=config.memory.ratio > 0,
        seed=config.seed,
        recall={name: v for name, v in result.items() if name.startswith("recall@") or name in ("map@r", "r_precision")},
        curve=result.get("curve", ()),
        seconds=per_iteration * result["iterations"] if per_iteration else float("nan"),
        iterations=result["iterations"],
        trace=Trace(step=np.array([row["step"] for row in rows]), evaluations=evaluations, **series),
        notes=[(severity, text) for severity, text in result["notes"]],
        data=f"{config.data.name}, {result['protocol']} classes never seen in training",
        config=summary,
        command=f"xbm train --config {folder.name}/config.yaml",
        versions={name: str(version) for name, version in result["versions"].items()},
        **pictures,
    )
