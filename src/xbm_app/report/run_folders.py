"""What training wrote to run folders, read back: for a report (`xbm report`), and the logged curves (`xbm drift`)."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xbm.errors import DamagedFileError, InputError
from xbm_app.data.images import REID, Dataset, ImageSet
from xbm_app.files import read_arrays, read_json, reading
from xbm_app.report.groups import SERIES, Doubtful, Match, Mined, Query, RunView, Trace
from xbm_app.report.page import write_report
from xbm_app.report.writing import listed
from xbm_app.train import config as configs
from xbm_app.train.dataset import read_run
from xbm_app.train.losses import is_theirs
from xbm_app.train.metrics import COLUMNS, read_metrics

SHOWN = 20  # queries on the page, the same for every run
CHOSEN = "Drawn at random from the queries whose nearest image is wrong in at least one of these runs."
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}

Examples = dict[str, np.ndarray]  # what examples.npz of a run folder contains


def report_runs(folders: Sequence[Path], out: Path, groups: Sequence[str] | None = None) -> Path:
    """Writes one page about these runs. Runs with the same entry in `groups` are seeds of one setting."""
    with reading(folders[0].parent if len(folders) > 1 else folders[0]):
        return _report(folders, out, groups)


def _report(folders: Sequence[Path], out: Path, groups: Sequence[str] | None) -> Path:
    settings = [configs.load(folder / "config.yaml") for folder in folders]
    labels = list(groups) if groups is not None else [_group(config) for config in settings]
    shown = {k: (_examples(folders[k]), _open_data(settings[k], folders[k])) for k in _first_seeds(labels, settings)}
    with_pictures = [(e, dataset) for e, dataset in shown.values() if e and dataset]
    chosen, how = _choose_queries(with_pictures) if len(folders) > 1 else _sample_queries(with_pictures)
    views = []
    for k, (folder, config, label) in enumerate(zip(folders, settings, labels)):
        pictures: dict[str, Any] = {}
        examples, dataset = shown.get(k, ({}, None))
        if dataset is not None and examples:
            with suppress(InputError):  # images were deleted since: show this run without pictures
                pictures = {
                    "queries": _queries(examples, dataset, chosen),
                    "chosen": how,
                    "right": _correct(examples, dataset)[:, 0],
                    "mined": _mined(examples, dataset),
                    "doubtful": _doubtful(examples, dataset),
                }
        with reading(folder):
            views.append(_view(folder, config, label, pictures))
    names = listed(list(dict.fromkeys(_name(folder, config) for folder, config in zip(folders, settings))))
    runs = "one run" if len(folders) == 1 else f"{len(folders)} runs"
    both = {config.memory.ratio > 0 for config in settings} == {False, True}
    return write_report(views, out, title=f"What the memory does: {names}" if both else f"{names}: {runs}")


def read_result(folder: Path) -> dict[str, Any]:
    """The final figures of a run.

    Raises:
        InputError: the run is not finished.
    """
    try:
        return read_json(folder / "result.json")
    except FileNotFoundError:
        raise InputError(f"{folder} holds no finished run: finish it with `xbm train --resume {folder}`") from None


def _group(config: configs.Config) -> str:
    return f"{_loss(config)}, {_memory(config)}"


def _loss(config: configs.Config) -> str:
    return config.loss.name if is_theirs(config.loss.name) else f"{config.loss.name}, {config.reduction}"


def _memory(config: configs.Config) -> str:
    return f"memory R_M {config.memory.ratio:g}, {config.memory.update}" if config.memory.ratio else "no memory"


def _first_seeds(labels: Sequence[str], settings: Sequence[configs.Config]) -> list[int]:
    """The run with the lowest seed of each group: pictures of all seeds would make the page heavy without saying more."""
    first: dict[str, int] = {}
    for k in sorted(range(len(labels)), key=lambda k: settings[k].seed):
        first.setdefault(labels[k], k)
    return sorted(first.values())


def _examples(folder: Path) -> Examples:
    path = folder / "examples.npz"
    if not path.exists():
        return {}
    with reading(path):
        return read_arrays(path)


def _open_data(config: configs.Config, folder: Path) -> Dataset | None:
    """The run's data, or None if it was moved: the report is then written without pictures."""
    try:
        return read_run(config, folder)
    except DamagedFileError:
        raise
    except InputError:
        return None


def _correct(examples: Examples, dataset: Dataset) -> np.ndarray:
    """(Q, k) bool: whether each retrieved image has the query's class."""
    protocol = dataset.protocols[0]
    gallery = protocol.gallery or protocol.query
    retrieved = examples["neighbours"]  # -1 where a gallery without the query's own camera has no more images
    return (np.asarray(gallery.labels)[retrieved] == np.asarray(protocol.query.labels)[:, None]) & (retrieved >= 0)


def _choose_queries(runs: Sequence[tuple[Examples, Dataset]]) -> tuple[np.ndarray, str]:
    """Queries to show for several runs: a random choice of those that some run gets wrong, since the others look alike."""
    firsts = [_correct(examples, dataset)[:, 0] for examples, dataset in runs]
    if not firsts or len({len(first) for first in firsts}) > 1:
        return np.empty(0, np.int64), CHOSEN
    wrong_somewhere = np.flatnonzero(~np.all(firsts, axis=0))
    return np.random.default_rng(0).permutation(wrong_somewhere)[:SHOWN], CHOSEN


def _sample_queries(runs: Sequence[tuple[Examples, Dataset]]) -> tuple[np.ndarray, str]:
    """Queries to show for one run: right and wrong ones in the proportion of all, from the first one on."""
    if not runs:
        return np.empty(0, np.int64), ""
    first = _correct(*runs[0])[:, 0]
    order = np.random.default_rng(0).permutation(len(first))
    right, wrong = order[first[order]], order[~first[order]]
    share = len(right) / len(first)
    turns = np.diff(np.floor(share * np.arange(min(SHOWN, len(first)) + 1) + 0.5)) > 0  # True: a right one is next
    chosen = np.array([(right if turn else wrong)[np.sum(turns[:k] == turn)] for k, turn in enumerate(turns)], np.int64)
    return chosen, (
        f"Drawn at random, with as many wrong ones as among all queries: the nearest image has the query’s class for "
        f"{turns.sum()} of these {len(turns)}, and for {100 * share:.1f} % of all {len(first):,}."
    )


def _queries(examples: Examples, dataset: Dataset, chosen: np.ndarray) -> list[Query]:
    query = dataset.protocols[0].query
    gallery = dataset.protocols[0].gallery or query
    correct = _correct(examples, dataset)
    queries = []
    for q in chosen[chosen < len(correct)].tolist():
        retrieved = zip(examples["neighbours"][q], examples["similarities"][q], correct[q])
        matches = [Match(gallery.open(int(j)), float(s), bool(ok)) for j, s, ok in retrieved if j >= 0]
        queries.append(Query(query.describe(q), query.open(q), matches))
    return queries


def _mined(examples: Examples, dataset: Dataset) -> list[Mined]:
    if not examples.get("mined_memory", np.empty(0)).size:
        return []
    train = dataset.train
    anchors = []
    for k, (anchor, positive) in enumerate(zip(examples["mined_anchor"].tolist(), examples["mined_positive"].tolist())):
        batch, memory = (_matches(train, examples, f"mined_{source}", k) for source in ("batch", "memory"))
        anchors.append(Mined(train.open(anchor), train.open(positive), batch, memory))
    return anchors


def _doubtful(examples: Examples, dataset: Dataset) -> list[Doubtful]:
    train = dataset.train
    images = []
    for k, image in enumerate(examples.get("doubted_image", np.empty(0)).tolist()):
        label, nearest = (str(train.class_names[c]) for c in (train.labels[image], examples["doubted_nearest"][k]))
        own, other = (_matches(train, examples, f"doubted_{side}", k) for side in ("own", "other"))
        images.append(Doubtful(train.describe(image), train.open(image), label, nearest, own, other))
    return images


def _matches(images: ImageSet, examples: Examples, name: str, k: int) -> list[Match]:
    """Row k of the images stored under this name, without padding."""
    return [Match(images.open(int(j)), float(s)) for j, s in zip(examples[name][k], examples[f"{name}_s"][k]) if j >= 0]


def _name(folder: Path, config: configs.Config) -> str:
    """What the data of a run is called: the user's own by its folder or table."""
    return str(read_result(folder).get("data", {}).get("name", config.data.name))


def _view(folder: Path, config: configs.Config, group: str, pictures: dict[str, Any]) -> RunView:
    result = read_result(folder)
    rows = read_metrics(folder / "metrics.csv")
    series = {name: np.array([row[name] for row in rows]) for name in ("step", *SERIES)}
    evaluations = [(int(row["step"]), row["recall@1"]) for row in rows if not math.isnan(row["recall@1"])]
    per_iteration = result.get("seconds_per_iteration")
    reid = result["protocol"] == REID
    others = ("map", "map@r", "r_precision") if reid else ("map@r", "r_precision")
    cameras = f", each query without images of its class and {config.data.exclude_same}: R@K is CMC@K" if reid else ""
    return RunView(
        name=folder.name,
        group=group,
        loss=config.loss.name,
        reduction=config.reduction if config.loss.name in ("contrastive", "triplet", "margin") else "",
        memory=config.memory.ratio > 0,
        seed=config.seed,
        recall={name: v for name, v in result.items() if name.startswith("recall@") or name in others},
        curve=result.get("curve", ()),
        seconds=per_iteration * result["iterations"] if per_iteration else math.nan,
        iterations=result["iterations"],
        trace=Trace(evaluations=evaluations, **series),
        notes=[(severity, text) for severity, text in result["notes"]],
        data=f"{_name(folder, config)}, {result['protocol']} {_seen(result)}{cameras}",
        config={
            "trunk": f"{config.model.trunk}, {config.model.dim}-d",
            "batch": f"{config.batch.size}, {config.batch.sampler}",
            "loss": _loss(config),
            "memory": _memory(config),
            "optimizer": f"{OPTIMIZERS[config.optim.name]}, lr {config.optim.lr:g}, {config.optim.iterations} iterations",
        },
        command=f"xbm train --config {_from_here(folder)}/config.yaml",
        versions={name: str(version) for name, version in result["versions"].items()},
        **pictures,
    )


def _from_here(folder: Path) -> str:
    """The folder of a run as it is named in the folder that the command was called in."""
    whole = folder.resolve()
    return whole.relative_to(Path.cwd()).as_posix() if whole.is_relative_to(Path.cwd()) else folder.name


def _seen(result: dict[str, Any]) -> str:
    shared = result.get("data", {}).get("shared_classes", 0)
    return f"images, {shared:,} of whose classes also occur in training" if shared else "classes never seen in training"


# ------------------------------------------------------------------ the logged curves


class Curves(NamedTuple):
    """What a run logged during training."""

    columns: Mapping[str, Sequence[float | None]]  # "step" and one column per quantity; None where nothing was measured
    decays: tuple[int, ...]  # iterations at which the learning rate fell
    iterations: int  # of the whole run

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """(steps, values) of one column, without its gaps."""
        points = [(s, v) for s, v in zip(self.columns.get("step", ()), self.columns.get(name, ())) if v is not None]
        return [s for s, _ in points], [v for _, v in points]  # type: ignore[misc]


def read_columns(folder: Path) -> dict[str, list[float | None]]:
    """The metrics of a run folder without empty columns, to four digits; None where nothing was measured."""
    rows = read_metrics(folder / "metrics.csv")
    table = {name: [None if math.isnan(row[name]) else float(f"{row[name]:.4g}") for row in rows] for name in COLUMNS}
    return {name: values for name, values in table.items() if any(value is not None for value in values)}


def read_drift(folder: Path) -> Curves:
    """The curves of a run that has measured drift.

    Raises:
        InputError: the folder contains no run, or the run has not measured drift yet.
    """
    config = configs.load(folder / "config.yaml")
    if not (folder / "metrics.csv").exists():
        raise InputError(f"{folder} has no metrics.csv: give a run folder made by `xbm train`")
    columns = read_columns(folder)
    if not any(name.startswith("drift_") for name in columns):
        raise InputError(f"{folder} has not measured drift yet: it takes {max(10, config.log.every)} iterations and ten more")
    return Curves(columns, config.optim.decay_at, config.optim.iterations)
