"""The typed config of a run, read strictly: an unknown key fails with the nearest valid name."""

import math
import textwrap
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from xbm.errors import InputError, unknown
from xbm_app.files import replacing

LARGEST_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Data:
    name: str = "glyphs"  # glyphs, a benchmark of `xbm datasets`, or "own" for a folder or table
    root: str | None = None  # the folder with the data
    store: str | None = None  # a store created by `xbm prepare`
    feed: str = "auto"  # decode, store, resident; auto: store if there is one, resident on a GPU or in memory, else decode
    augmentation: str = "paper"  # paper: 256² then random 224 crop and flip; official: random resized crop; shift: small images
    resize: int = 256
    crop: int = 224
    holdout: float = 0.0  # share of the training classes held out for validation; 0 trains on all of them
    fold: int = 0  # which of the disjoint sets of training classes is held out, from 0
    noise: float = 0.0  # share of the training labels replaced by wrong ones, to measure robustness
    skip_problems: bool = False  # leave out broken, tiny and duplicate images, and classes with a single image


@dataclass(frozen=True)
class Model:
    trunk: str = "googlenet"  # googlenet, googlenet_bvlc, resnet50, bn_inception, efficientnet_lite0, small, timm/NAME
    dim: int = 512  # D
    pooling: str = "average"  # average (the paper) or max (its released code)
    weights: str = "imagenet"  # imagenet, none, or a file
    freeze_batch_norm: bool = False  # as the supplementary does for CUB and Cars
    trunk_lr: float = 1.0  # learning rate of the trunk, as a multiple of the head's (the supplementary: 0.1)


@dataclass(frozen=True)
class Batch:
    size: int = 64  # m
    per_class: int = 4  # K
    sampler: str = "pk"  # pk or shuffle
    accumulate: int = 1  # batches per optimizer step


@dataclass(frozen=True)
class Loss:
    name: str = "contrastive"
    reduction: str = "sum"  # sum (the paper), mean, or balanced: negatives never outweigh positives
    options: dict[str, float] = field(default_factory=dict)  # e.g. {margin: 0.5}
    exclude: str | None = None  # rows that are the anchor itself: instance (None), or copy, as all presets have it


@dataclass(frozen=True)
class Memory:
    ratio: float = 1.0  # R_M = M / N; 0 trains without memory
    update: str = "queue"  # queue, moving_average, backprop
    momentum: float | None = None  # m of the keyed updates; None: 0.9 for moving_average, 0 for backprop
    alpha: float = 0.1  # α of backprop
    updates_per_step: int = 1  # ×n: batches enqueued per step, the anchors included
    start: int = 1000  # warm-up iterations without memory
    fill: bool = True  # start from embeddings of random training images; False: start empty
    batch_weight: float = 0.0  # weight of the in-batch loss once the memory is on (Algorithm 1: 0)
    weight: float = 1.0  # weight of the loss against the memory
    spread: str = "replicated"  # with several processes: replicated (all rows on each) or sharded (a part on each)
    reduction: str | None = None  # reduction of the loss against the memory; None: loss.reduction
    doubt: str = "keep"  # likely label errors: keep, or skip (ignore the row and its image until it is written again)
    dtype: str = "auto"  # storage type of the rows; auto: bfloat16 for a queue on a GPU, else float32


@dataclass(frozen=True)
class Optim:
    lr: float = 3e-4
    weight_decay: float = 5e-4
    iterations: int = 34_000
    decay_at: tuple[int, ...] = (24_000,)  # lr × 0.1 at each
    schedule: str = "step"  # step, or plateau: × 0.1 when the loss stalls (the released code)
    precision: str = "auto"  # fp32, bf16, fp16; auto: bf16 on a GPU, fp32 on a CPU


@dataclass(frozen=True)
class Log:
    every: int = 100  # iterations between two rows of metrics
    evaluate_every: int = 0  # iterations between two evaluations on held-out classes (data.holdout); 0: only at the end
    checkpoint_every: int = 500
    wandb: bool = False


@dataclass(frozen=True)
class Config:
    preset: str = "glyphs"
    recipe: str = "paper"
    seed: int = 0
    device: str = "auto"
    data: Data = Data()
    model: Model = Model()
    batch: Batch = Batch()
    loss: Loss = Loss()
    memory: Memory = Memory()
    optim: Optim = Optim()
    log: Log = Log()

    @property
    def reduction(self) -> str:
        """The reduction of the loss against the memory, or of the in-batch loss without one."""
        return (self.memory.reduction if self.memory.ratio else None) or self.loss.reduction


def from_dict(values: Mapping[str, Any], kind: type = Config, where: str = "") -> Any:
    """Builds a dataclass from plain values.

    Raises:
        InputError: an unknown key (naming the nearest valid one) or a value of the wrong type.
    """
    hints = get_type_hints(kind)
    arguments = {}
    for key, value in values.items():
        path = f"{where}{key}"
        if key not in hints:
            raise unknown("setting", path, [f"{where}{name}" for name in hints])
        arguments[key] = _convert(value, hints[key], path)
    return kind(**arguments)


def override(config: Config, settings: Mapping[str, Any]) -> Config:
    """Returns the config with some settings changed: {"memory.ratio": 0.5}.

    Example:
        >>> override(Config(), {"memory.ratio": "0.5"}).memory.ratio
        0.5
    """
    for path, value in settings.items():
        config = _override(config, path.split("."), value, path)
    return config


def check(config: Config) -> None:
    """Raises InputError for values that no run can start with."""
    least = {
        "seed": 0, "batch.size": 1, "batch.per_class": 1, "batch.accumulate": 1, "memory.ratio": 0, "memory.start": 0,
        "memory.updates_per_step": 1, "optim.lr": 0, "optim.iterations": 1, "log.every": 1, "log.checkpoint_every": 1,
        "log.evaluate_every": 0, "data.holdout": 0, "data.fold": 0, "optim.weight_decay": 0, "memory.weight": 0,
        "memory.batch_weight": 0, "memory.alpha": 0, "model.dim": 1, "data.resize": 1, "data.crop": 1,
    }  # fmt: skip
    values = flat(config)
    for name, lowest in least.items():
        if not values[name] >= lowest:
            raise InputError(f"{name} must be at least {lowest}, got {values[name]}")
        if values[name] == math.inf:
            raise InputError(f"{name} must be finite, got {values[name]}")
    if config.seed > LARGEST_SEED:
        raise InputError(f"seed must be at most {LARGEST_SEED}, got {config.seed}")
    if config.memory.ratio and not config.memory.weight and not config.memory.batch_weight:
        raise InputError(
            "memory.weight and memory.batch_weight are both 0, so there is no loss to train on: set one of them above 0"
        )
    if any(step < 0 for step in config.optim.decay_at):
        raise InputError(f"optim.decay_at must be iterations of at least 0, got {config.optim.decay_at}")
    for name, value in config.loss.options.items():
        if not math.isfinite(value):
            raise InputError(f"{name} in loss.options must be finite, got {value}")
    if config.log.evaluate_every and not config.data.holdout:
        raise InputError(
            "log.evaluate_every needs held-out training classes, because test classes are scored only at the end: "
            "set data.holdout=0.2, or log.evaluate_every=0"
        )


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The value of every setting by its full name."""
    values: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        values |= flat(value, f"{prefix}{each.name}.") if is_dataclass(value) else {f"{prefix}{each.name}": value}
    return values


def _override(node: Any, path: list[str], value: Any, full: str) -> Any:
    hints = get_type_hints(type(node))
    if path[0] not in hints or (len(path) == 1) == is_dataclass(hints[path[0]]):
        raise unknown("setting", full, flat(Config()))
    if len(path) > 1:
        return replace(node, **{path[0]: _override(getattr(node, path[0]), path[1:], value, full)})
    return replace(node, **{path[0]: _convert(value, hints[path[0]], full)})


def _convert(value: Any, hint: Any, path: str) -> Any:
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise InputError(f"{path} must be a section with keys ({', '.join(f.name for f in fields(hint))}), not {value!r}")
        return from_dict(value, hint if isinstance(hint, type) else type(hint), f"{path}.")
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):  # X | None
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        return _convert(value, next(a for a in get_args(hint) if a is not type(None)), path)
    try:
        if origin is tuple:
            items = _unbracketed(value).replace(",", " ").split() if isinstance(value, str) else value
            return tuple(_convert(item, get_args(hint)[0], path) for item in items)
        if origin is dict:
            parsed = _yaml(value) if isinstance(value, str) else value
            return {str(k): _number(v) for k, v in dict(parsed or {}).items()}
        if hint is bool:
            return _boolean(value)
        if hint is int:
            whole = int(str(value).replace("_", "")) if isinstance(value, str) else value
            if isinstance(whole, bool) or whole != int(whole):
                raise ValueError
            return int(whole)
        if hint is float:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        if not isinstance(value, str):
            raise ValueError
        return value
    except (ValueError, TypeError, AttributeError, OverflowError):
        wanted = WANTED.get(origin or hint, str(hint))
        raise InputError(f"{path} must be {wanted}, not {value!r}") from None


WANTED = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text",
    tuple: "whole numbers separated by commas", dict: "names and numbers, such as {margin: 0.5}",
}  # fmt: skip


def _unbracketed(text: str) -> str:
    text = text.strip()
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError from None


def _number(value: Any) -> float:
    return value if isinstance(value, bool) else float(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return value.lower() in ("true", "yes", "on")
    raise ValueError


def to_dict(config: Config) -> dict[str, Any]:
    """Converts a config to plain values that YAML can hold."""

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items()}
        return [plain(v) for v in x] if isinstance(x, tuple | list) else x

    return plain(asdict(config))


def save(config: Config, path: Path) -> None:
    import yaml

    with replacing(path) as temporary:
        temporary.write_text(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")


def load(path: Path) -> Config:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} does not exist: pass a run folder or a config file") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: pass a config file, such as {path / 'config.yaml'}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML ({textwrap.shorten(str(error), 300)}): correct it") from None
    if not isinstance(values, Mapping):
        raise InputError(f"{path} holds no settings: write `section:` and `key: value` lines")
    return from_dict(values)
