"""The typed config of a run, read strictly: an unknown key fails with the nearest valid name."""

import math
import textwrap
import types
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from xbm.errors import DamagedFileError, InputError, unknown
from xbm_app.files import replacing, verify

LARGEST_SEED = (1 << 63) - 1
LARGEST = (1 << 31) - 1  # of any other whole number
LARGEST_FLOAT = 1e18  # the product of two still fits in float32
LARGEST_RATIO = 1000
WANTED = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text",
    tuple: "whole numbers separated by commas", tuple[str, ...]: "names separated by commas",
    dict: "names and numbers, such as {margin: 0.5}",
}  # fmt: skip


@dataclass(frozen=True)
class Data:
    name: str = "glyphs"  # glyphs, a benchmark of `xbm datasets`, or "own" for a folder or table
    root: str | None = None  # the folder with the data
    store: str | None = None  # a store created by `xbm prepare`
    feed: str = "auto"  # decode, store, resident; auto: store if there is one, resident on a GPU or in memory, else decode
    augmentation: str = "paper"  # paper: random crop, flip; official: random resized crop; strong: distorted too; shift; none
    resize: int = 256
    crop: int = 224
    holdout: float = 0.0  # share of the training classes held out for validation; 0 trains on all of them
    fold: int = 0  # which of the disjoint sets of training classes is held out, from 0
    noise: float = 0.0  # share of the training labels replaced by wrong ones, to measure robustness
    skip_problems: bool = False  # leave out broken, tiny and duplicate images, and classes with a single image
    interpolation: str = "bilinear"  # how images are resized: bilinear, or bicubic, as most models of timm were trained
    transform: str | None = None  # what describes the transform that was passed to xbm.train; None: none
    label: str = "label"  # the column of a table, or the field of a .json file in tar shards, that says the class
    split: str = "split"  # the column of a table that says train, test, query or gallery
    exclude_same: str | None = None  # re-identification: a column such as camera, which a query and its matches may not share
    features: str | None = None  # folder for the features of a frozen trunk, to share them between runs; None: the run folder


@dataclass(frozen=True)
class Model:
    trunk: str = "googlenet"  # googlenet, googlenet_bvlc, resnet50, bn_inception, efficientnet_lite0, small, timm/NAME
    dim: int = 512  # D
    pooling: str = "average"  # average (the paper), max (its released code), or own (that of the timm model)
    weights: str = "imagenet"  # imagenet, none, or a file
    head_init: str = "uniform"  # uniform (that of nn.Linear), or kaiming (normal, fan out, no bias: the released code)
    freeze_batch_norm: bool = False  # as the supplementary does for CUB and Cars
    trunk_lr: float = 1.0  # learning rate of the trunk, as a multiple of the head's (the supplementary: 0.1)
    freeze: str = "none"  # what is not trained: none, trunk (its features are computed once), blocks:N (the stem and N blocks)
    compile: bool = False  # run the trunk through torch.compile in training
    checkpointing: bool = False  # recompute activations in the backward pass: slower, in less memory; timm models only


@dataclass(frozen=True)
class Batch:
    size: int = 64  # m
    per_class: int = 4  # K
    sampler: str = "pk"  # pk, shuffle, or stream: tar shards in their order
    buffer: int | None = None  # images of a stream that wait for others of their class; None: per_class for each class and more
    accumulate: int = 1  # batches per optimizer step
    chunk: int = 0  # images that are embedded at a time, for batches of thousands; 0: the whole batch


@dataclass(frozen=True)
class Loss:
    name: str = "contrastive"  # a loss of xbm, or pml/NAME for one of pytorch-metric-learning
    reduction: str = "sum"  # sum (the paper), mean, or balanced: negatives never outweigh positives; not for pml/NAME
    options: dict[str, float | bool | str] = field(default_factory=dict)  # e.g. {margin: 0.5}
    exclude: str | None = None  # rows that are the anchor itself: instance (None), or copy, as all presets have it
    lr_factor: float = 1.0  # learning rate of the loss's own parameters (proxies), as a multiple of the head's


@dataclass(frozen=True)
class Memory:
    ratio: float = 1.0  # R_M = M / N; 0 trains without memory
    size: int | None = None  # M in rows, of a queue; None: R_M · N
    update: str = "queue"  # queue, moving_average, backprop
    momentum: float | None = None  # m of the keyed updates; None: 0.9 for moving_average, 0 for backprop
    alpha: float = 0.1  # α of backprop
    updates_per_step: int = 1  # ×n: batches enqueued per step, the anchors included
    start: int = 1000  # warm-up iterations without memory
    fill: bool = True  # start from embeddings of random training images; False: start empty
    batch_weight: float = 0.0  # weight of the in-batch loss once the memory is on (Algorithm 1: 0)
    weight: float = 1.0  # weight of the loss against the memory
    spread: str = "replicated"  # with several processes: replicated (all rows on each) or sharded (a part on each)
    keys: float = 0.0  # m of a slow copy of the model that embeds what is enqueued (as MoCo); 0: the model itself
    reduction: str | None = None  # reduction of the loss against the memory; None: loss.reduction
    doubt: str = "keep"  # likely label errors: keep, or skip (ignore the row and its image until it is written again)
    dtype: str = "auto"  # storage type of the rows; auto: bfloat16 for a queue on a GPU, else float32


@dataclass(frozen=True)
class Optim:
    lr: float = 3e-4
    weight_decay: float = 5e-4
    iterations: int = 34_000
    decay_at: tuple[int, ...] = (24_000,)  # lr × 0.1 at each
    schedule: str = "step"  # step, cosine, linear, or plateau: × 0.1 when R@1 on held-out classes stalls (the released code)
    precision: str = "auto"  # fp32, bf16, fp16; auto: bf16 on a GPU, fp32 on a CPU
    name: str = "adam"  # adam (the paper), adamw, sgd; the last two spare norms and biases from weight decay
    warmup: int = 0  # first iterations, in which the learning rate rises linearly
    clip: float = 0.0  # largest norm of the gradient; 0: any
    layer_decay: float = 1.0  # learning rate of a layer of the trunk, as a multiple of the next one's (transformers: 0.65)
    ema: float = 0.0  # decay of an average of the weights, which is evaluated and saved (such as 0.999); 0: none


@dataclass(frozen=True)
class Log:
    every: int = 100  # iterations between two rows of metrics
    evaluate_every: int = 0  # iterations between two evaluations on held-out classes (data.holdout); 0: only at the end
    checkpoint_every: int = 500
    trackers: tuple[str, ...] = ("tensorboard",)  # where the metrics go besides metrics.csv: tensorboard, wandb, mlflow
    project: str = "xbm"  # the project of Weights & Biases, or the experiment of MLflow
    wandb: bool = False  # the former name of trackers=tensorboard,wandb


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
    hints = _hints(kind)
    arguments = {}
    for key, value in values.items():
        path = f"{where}{key}"
        if key not in hints:
            raise unknown("setting", path, [f"{where}{name}" for name in hints])
        arguments[key] = _convert(value, hints[key], path)
    return kind(**arguments)


_hints = cache(get_type_hints)  # the types of a dataclass's fields: finding them takes longer than reading a config


def override(config: Config, settings: Mapping[str, Any]) -> Config:
    """Returns the config with some settings changed: {"memory.ratio": 0.5}.

    Example:
        >>> override(Config(), {"memory.ratio": "0.5"}).memory.ratio
        0.5
        >>> override(Config(), {"loss.options.margin": "0.4"}).loss.options
        {'margin': 0.4}
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
        "memory.batch_weight": 0, "memory.alpha": -1, "model.dim": 1, "data.resize": 1, "data.crop": 1, "optim.ema": 0,
        "loss.lr_factor": 0, "memory.size": 1, "batch.chunk": 0, "optim.warmup": 0, "optim.clip": 0, "optim.layer_decay": 0,
    }  # fmt: skip
    values = flat(config)
    for name, lowest in least.items():
        if values[name] is None:
            continue
        if not values[name] >= lowest:
            raise InputError(f"{name} must be at least {lowest}, got {values[name]}")
        if values[name] == math.inf:
            raise InputError(f"{name} must be finite, got {values[name]}")
        if isinstance(values[name], int) and values[name] > LARGEST and name != "seed":
            raise InputError(f"{name} must be at most {LARGEST}, got {values[name]}")
    for name, value in values.items():
        if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
            raise InputError(f"{name} must be at most {LARGEST_FLOAT:g}, got {value}")
    if config.memory.ratio > LARGEST_RATIO:
        raise InputError(f"memory.ratio must be at most {LARGEST_RATIO}, got {config.memory.ratio}: 1 is one row per image")
    if config.seed > LARGEST_SEED:
        raise InputError(f"seed must be at most {LARGEST_SEED}, got {config.seed}")
    if config.memory.ratio and not config.memory.weight and not config.memory.batch_weight:
        raise InputError("memory.weight and memory.batch_weight are both 0: there is no loss to train on, set one above 0")
    if any(step < 0 for step in config.optim.decay_at):
        raise InputError(f"optim.decay_at must be iterations of at least 0, got {config.optim.decay_at}")
    if config.optim.warmup and config.optim.schedule == "plateau":
        raise InputError("optim.warmup needs a schedule that is known beforehand: set optim.schedule=step, cosine or linear")
    if not 0 < config.optim.layer_decay <= 1 or config.optim.ema >= 1:
        raise InputError("optim.layer_decay must be above 0 and at most 1, and optim.ema less than 1")
    for name, value in config.loss.options.items():
        if not isinstance(value, str) and not math.isfinite(value):
            raise InputError(f"{name} in loss.options must be finite, got {value}")
    if config.log.evaluate_every and not config.data.holdout:
        raise InputError(
            "log.evaluate_every needs held-out training classes, because test classes are scored only at the end: "
            "set data.holdout=0.2, or log.evaluate_every=0"
        )
    if config.optim.schedule == "plateau" and not config.log.evaluate_every:
        advice = "set data.holdout=0.2 and log.evaluate_every=1000, or optim.schedule=step"
        raise InputError(f"optim.schedule=plateau looks at R@1 on held-out training classes: {advice}")


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The value of every setting by its full name."""
    values: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        values |= flat(value, f"{prefix}{each.name}.") if is_dataclass(value) else {f"{prefix}{each.name}": value}
    return values


def _override(node: Any, path: list[str], value: Any, full: str) -> Any:
    hints = _hints(type(node))  # type: ignore[arg-type]  # a class is hashable
    if len(path) == 2 and get_origin(hints.get(path[0])) is dict:
        try:
            return replace(node, **{path[0]: {**getattr(node, path[0]), path[1]: option_of(value)}})
        except (ValueError, TypeError):
            raise InputError(f"{full} must be a number, true or false, or a word, not {value!r}") from None
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
            items = unbracketed(value).replace(",", " ").split() if isinstance(value, str) else value
            return tuple(_convert(item, get_args(hint)[0], path) for item in items)
        if origin is dict:
            parsed = yaml_of(value) if isinstance(value, str) else value
            return {str(name): option_of(option) for name, option in dict(parsed or {}).items()}
        if hint is bool:
            return boolean_of(value)
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
        wanted = WANTED.get(hint) or WANTED.get(origin, str(hint))
        raise InputError(f"{path} must be {wanted}, not {value!r}") from None


def to_dict(config: Config) -> dict[str, Any]:
    """Converts a config to plain values that YAML can hold."""

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: plain(v) for k, v in x.items()}
        return [plain(v) for v in x] if isinstance(x, tuple | list) else x

    return plain(asdict(config))


def save(config: Config, path: Path) -> None:
    import yaml

    with replacing(path, checksum=True) as temporary:
        temporary.write_text(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")


def load(path: Path) -> Config:
    import yaml

    try:
        verify(path, warn=False)  # without a checksum, it is the user's own
    except DamagedFileError:  # editing the config of a run is how to tell it that its data has moved
        warnings.warn(f"{path} was edited or damaged since xbm wrote it: what it says now is used", stacklevel=1)
    try:
        values = without_aliases(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} does not exist: pass a run folder or a config file") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: pass a config file, such as {path / 'config.yaml'}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not valid YAML ({textwrap.shorten(str(error), 300)}): correct it") from None
    if not isinstance(values, Mapping):
        raise InputError(f"{path} holds no settings: write `section:` and `key: value` lines")
    return from_dict(values)


# ------------------------------------------------------------------ what the text of a setting stands for


def unbracketed(text: str) -> str:
    text = text.strip()
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def yaml_of(text: str) -> Any:
    """The value of a YAML text; ValueError if it is none."""
    import yaml

    try:
        return without_aliases(text)
    except (yaml.YAMLError, RecursionError):
        raise ValueError from None


def without_aliases(text: str) -> Any:
    """The values of a YAML text without aliases, of which a few lines can stand for gigabytes."""
    import yaml

    for token in yaml.scan(text, yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            raise yaml.YAMLError(f"line {token.start_mark.line + 1} has the alias *{token.value}: write the value itself")
    return yaml.safe_load(text)


def option_of(value: Any) -> float | bool | str:
    """A number, true or false, or a word; as text they are told apart as YAML does."""
    parsed = yaml_of(value) if isinstance(value, str) else value
    if isinstance(parsed, bool):
        return parsed
    try:
        return float(parsed)
    except ValueError:
        return parsed


def boolean_of(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return value.lower() in ("true", "yes", "on")
    raise ValueError
