"""Stores finished runs as small JSON files, one per run, and finds them again by their config. Keeps the classes of the test
queries too.

Two experiments that need the same run find the same file. Runs are compared by their whole config, without the settings that
cannot change a figure (the location of the data, how often checkpoints are written). A setting that is newer than a file has
its default value there.

The classes of a data set's test queries are kept beside the results, so that the statistics need no images.
`labels/NAME.json` in the results folder has the queries of the first protocol in the order of the data set, as runs of equal
labels; `python -m paper labels --data NAME=DIR` writes it.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np

from xbm.errors import InputError
from xbm.losses import LOSSES
from xbm_app.data.images import Dataset
from xbm_app.files import replacing
from xbm_app.report.run_folders import Curves
from xbm_app.train.config import Config, flat

FORMAT = 1
APART = {
    "preset", "recipe", "device", "data.root", "data.store", "data.feed", "data.features",
    "data.skip_problems", "log.checkpoint_every",
    "log.evaluate_every", "log.wandb", "log.trackers", "log.project", "memory.spread", "model.compile",
}  # fmt: skip
USUAL = flat(Config())
NAMED = ("imagenet", "none")  # weights that are no file
# settings that came when results had names: at their defaults they are no part of them
LATER = {
    "memory.doubt", "memory.size", "memory.keys", "data.fold", "data.interpolation", "loss.lr_factor", "model.head_init",
    "model.freeze", "model.checkpointing", "batch.chunk", "optim.name", "optim.warmup", "optim.clip", "optim.layer_decay",
    "optim.ema", "data.transform", "data.label", "data.split", "data.exclude_same", "batch.buffer",
}  # fmt: skip


def identity(config: Config) -> dict[str, Any]:
    """The settings that a figure depends on, by full name; a weights file is identified by its bare name."""
    settings = flat(config)
    apart = APART - {"log.evaluate_every"} if config.optim.schedule == "plateau" else APART  # there it decides the schedule
    kept = {name: _plain(value) for name, value in {**settings, **_unused(settings)}.items() if name not in apart}
    if kept["model.weights"] not in NAMED:
        kept["model.weights"] = Path(kept["model.weights"]).name
    return kept


def _unused(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that change nothing in this run, at their defaults: how a memory is kept that is not there, an α that is not
    used, a reduction of a loss that has but one, a fold of classes of which none is held out."""
    one = getattr(LOSSES.get(settings["loss.name"]), "one_reduction", False)
    names = ["loss.reduction", "memory.reduction"] if one else []
    names += [] if settings["data.holdout"] else ["data.fold"]
    if not settings["memory.ratio"]:
        names += [name for name in settings if name.startswith("memory.") and name != "memory.ratio"]
    else:
        keyed = {"queue": ["memory.momentum", "memory.alpha"], "moving_average": ["memory.alpha"]}
        names += keyed.get(settings["memory.update"], [])
    return {name: USUAL[name] for name in names}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


DEFAULTS = {**identity(Config()), "loss.exclude": "copy"}  # the default when the first records were written


def key(settings: Mapping[str, Any]) -> str:
    """A string that identifies a run: the same for the same settings, with missing and unused ones at their defaults."""
    return json.dumps(_whole(settings), sort_keys=True)


def _whole(settings: Mapping[str, Any]) -> dict[str, Any]:
    whole = {**DEFAULTS, **settings}
    return {**whole, **_unused(whole)}


def file_name(settings: Mapping[str, Any]) -> str:
    """A readable name with a hash of all settings."""
    s = _whole(settings)
    memory = "no-memory" if not s["memory.ratio"] else s["memory.update"].replace("_", "-")
    loss = s["loss.name"].replace("_", "-").replace("/", "-")
    split = "_held-out" if s["data.holdout"] else ""
    named = {name: value for name, value in s.items() if name not in LATER or value != DEFAULTS[name]}
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:10]
    return f"{s['data.name']}_{s['model.trunk'].replace('/', '-')}_{loss}_{memory}_seed{s['seed']}{split}_{digest}.json"


def folder_name(config: Config) -> str:
    """Of the run folder. A run at a constant rate that is scored on the way is the beginning of every longer one: they share a
    folder, and a longer one goes on where a shorter one ended."""
    settings = identity(config)
    return file_name({**settings, "optim.iterations": None} if may_go_on(config) else settings).removesuffix(".json")


def may_go_on(config: Config) -> bool:
    return bool(config.log.evaluate_every) and config.optim.schedule == "step" and not config.optim.decay_at


@dataclass(frozen=True)
class Record:
    """One finished run.

    Attributes:
        values: the contents of the file, which `workers.py` writes.
    """

    values: Mapping[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        return {**DEFAULTS, **self.values["config"]}

    @cached_property
    def key(self) -> str:
        return key(self.config)

    @cached_property
    def kind(self) -> str:
        """The key without the seed."""
        return key({**self.config, "seed": None})

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def measures(self) -> Mapping[str, Any]:
        """Measurements on the finished run, by name."""
        return self.values.get("measures", {})

    def score(self, name: str = "recall@1", protocol: str | None = None) -> float:
        """A score with the first protocol, or with the given one; 0 for a run that diverged."""
        if self.values.get("failed"):
            return 0.0
        protocols = self.values["scores"]
        scores = protocols.get(protocol, {}) if protocol is not None else next(iter(protocols.values()), {})
        return float(scores.get(name, float("nan")))

    @property
    def curves(self) -> Curves:
        """What was logged while it trained."""
        return Curves(self.values.get("curves", {}), self.config["optim.decay_at"], self.values.get("iterations", 0))

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """(steps, values) of one logged quantity, without its gaps."""
        return self.curves.curve(name)


class Records:
    """The finished runs of a folder. `refresh` reads files that were added later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, tuple[int, Record]] = {}  # by file name, with the time it was written
        self._by_key: dict[str, Record] = {}
        self._by_kind: dict[str, list[Record]] = {}  # runs that differ in their seed alone
        self.refresh()

    def refresh(self) -> None:
        files = {}
        for path in sorted(self.folder.glob("*.json")):
            if path.name.endswith(".part.json"):  # another process is writing it
                continue
            stamp = path.stat().st_mtime_ns
            known = self._read.get(path.name)
            files[path.name] = known if known is not None and known[0] == stamp else (stamp, Record(_read(path)))
        self._read = files
        self._by_key = {record.key: record for _, record in files.values()}
        self._by_kind = {}
        for record in self._by_key.values():
            self._by_kind.setdefault(record.kind, []).append(record)

    def find(self, settings: Mapping[str, Any]) -> Record | None:
        return self.get(key(settings))

    def get(self, which: str) -> Record | None:
        """The run with this key, see `key`."""
        return self._by_key.get(which)

    def seeds(self, settings: Mapping[str, Any]) -> list[Record]:
        """The runs with these settings and any seed, ordered by seed."""
        return sorted(self._by_kind.get(key({**settings, "seed": None}), []), key=lambda record: record.seed)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def write(self, values: Mapping[str, Any]) -> Path:
        """Writes the file of a finished run. Measurements of an earlier run with the same config are kept."""
        values = {name: value for name, value in values.items() if name != "format"}
        before = self.find(values["config"])
        if before is not None and not values.get("failed"):
            values = {**values, "measures": {**before.measures, **values.get("measures", {})}}
        path = self.folder / file_name(values["config"])
        older = [name for name, (_, record) in self._read.items() if record is before and name != path.name]
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
        with replacing(path) as beside:  # one line per entry, for readable diffs
            beside.write_text("{\n" + ",\n".join([f'"format": {FORMAT}', *lines]) + "\n}\n", encoding="utf-8")
        for name in older:  # the same run under an older name
            (self.folder / name).unlink(missing_ok=True)
        self.refresh()
        return path


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = values["format"] <= FORMAT and isinstance(values["config"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is no result of `python -m paper run`: repair or remove it") from None
    if not known:
        raise InputError(f"{path} has format {values['format']}, this version reads up to {FORMAT}: upgrade xbm")
    return values


def unpacked(hits: Mapping[str, Any]) -> np.ndarray:
    """(queries,) bool: which queries of a result retrieve their own class first, see `hits` in `workers.py`."""
    bits = np.frombuffer(base64.b64decode(hits["rank_1"]), np.uint8)
    return np.unpackbits(bits, count=hits["queries"]).astype(bool)


def digits(value: SupportsFloat) -> float:
    """Rounds a measurement to the four significant digits that result files keep."""
    return float(f"{float(value):.4g}")


# ------------------------------------------------------------------ the classes of the test queries


def labels_file(results: Path, data: str) -> Path:
    return results / "labels" / f"{data}.json"


def write_labels(results: Path, dataset: Dataset) -> Path:
    """Writes the classes of the queries of a data set's first protocol."""
    protocol = dataset.protocols[0]
    runs = runs_of(np.asarray(protocol.query.labels).tolist())
    path = labels_file(results, dataset.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        text = json.dumps({"data": dataset.name, "protocol": protocol.name, "queries": len(protocol.query), "runs": runs})
        beside.write_text(text + "\n", encoding="utf-8")
    return path


def read_labels(results: Path, data: str, queries: int) -> np.ndarray | None:
    """(queries,): the class of each query, or None if there is no such file.

    Args:
        results: folder of result files.
        queries: number of hits that the labels are for.

    Raises:
        InputError: the file has another number of queries.
    """
    path = labels_file(results, data)
    if not path.exists():
        return None
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    labels = np.repeat(*np.array(runs, np.int64).T)
    if len(labels) != queries:
        raise InputError(
            f"{path} has {len(labels)} queries, the results have {queries}: write it with `python -m paper labels --data "
            f"{data}=DIR` from the images that the runs were scored on"
        )
    return labels


def runs_of(labels: Sequence[int]) -> list[tuple[int, int]]:
    """(label, length) of each run of equal labels.

    Example:
        >>> runs_of([7, 7, 2, 7])
        [(7, 2), (2, 1), (7, 1)]
    """
    return [(label, len(list(run))) for label, run in groupby(labels)]
