"""How a pretrained transformer is trained by `auto`: short runs on the data at hand, compared on held-out training classes."""

import gc
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from xbm.distributed import the_ranks
from xbm.errors import DivergedError, InputError
from xbm_app.files import explain_disk_errors, locked, read_json, write_bytes, write_json
from xbm_app.models.timm_trunks import is_transformer
from xbm_app.progress import tell
from xbm_app.train.config import Config, load, override, save
from xbm_app.train.dataset import SPLIT, begin_run, read_run
from xbm_app.train.loop import train
from xbm_app.train.presets import few_classes_settings
from xbm_app.train.state import Hooks

FOLDER = "trials"  # in the folder of a run, until its recipe is chosen
RESULT = "trials.json"  # in the folder of a run: what was compared, the scores, and the choice
HELD_OUT = 0.2  # share of the training classes
FEWEST_CLASSES = 20  # training classes for a comparison: with fewer, the held-out ones say little
SHARE, MOST = 5, 1_000  # a trial has a fifth of the iterations of the run, and no more than this
WARM_UP = 20  # the warm-up is this part of the iterations
SCORE = "map@r"  # as for the best checkpoint of a run

# What fine-tuning transformers usually takes. We had no pretrained transformer to measure it on, hence the comparison.
MODERN: dict[str, Any] = {
    "optim.name": "adamw", "optim.schedule": "cosine", "optim.decay_at": (), "optim.weight_decay": 0.05, "optim.clip": 1.0,
    "optim.layer_decay": 0.75,
}  # fmt: skip
CANDIDATES: dict[str, dict[str, Any]] = {
    "adamw 1e-4": {**MODERN, "optim.lr": 1e-4},
    "adamw 3e-5": {**MODERN, "optim.lr": 3e-5},
    "preset": {},
}
UNCHOSEN = {"optim.iterations", "optim.precision", "optim.ema"}  # settings that leave the choice open


def has_choice(config: Config, settings: Mapping[str, Any]) -> bool:
    """Whether `auto` chooses how to train: a pretrained transformer whose optimizer the user's `settings` leave open."""
    model = config.model
    chosen = [name for name in settings if name.startswith("optim.") and name not in UNCHOSEN] or "model.trunk_lr" in settings
    trained = config.recipe == "auto" and model.weights != "none" and model.freeze != "trunk"
    return trained and not chosen and is_transformer(model.trunk)


def with_candidate(config: Config, name: str) -> Config:
    """The config with the settings of a candidate; its warm-up is a share of the iterations.

    Example:
        >>> with_candidate(override(Config(), {"optim.iterations": 400}), "adamw 3e-5").optim.warmup
        20
    """
    settings = CANDIDATES[name]
    return override(config, {**settings, "optim.warmup": config.optim.iterations // WARM_UP}) if settings else config


def trial_of(config: Config, name: str, classes: int) -> Config:
    """The short run of a candidate, which trains on most of the training `classes` and is scored on the others."""
    whole = config.optim.iterations
    short = max(1, min(whole // SHARE, MOST))
    changes = {
        "data.holdout": config.data.holdout or HELD_OUT,
        "optim.iterations": short,
        "optim.decay_at": tuple(step * short // whole for step in config.optim.decay_at),
        "log.evaluate_every": 0,
        "log.trackers": (),
        "log.wandb": False,
    }
    trial = override(config, changes)
    return with_candidate(override(trial, few_classes_settings(trial, classes)), name)


def choose(config: Config, folder: Path, hooks: Hooks, quiet: bool) -> Config:
    """Compares the candidates, writes `trials.json` and the config of the run to its folder, and returns that config.

    A process that is killed continues where it was: finished trials are not repeated, and the last one is resumed.
    """
    ranks, trials = the_ranks(), folder / FOLDER
    if (folder / "config.yaml").exists():
        raise InputError(f"{folder} already holds a run: continue it with --resume {folder}, or use another --out")
    with explain_disk_errors(folder), locked(folder, ranks.first):
        whole = override(config, {"data.holdout": 0.0})  # to count all classes
        dataset = read_run(whole, folder) if undecided(folder) else begin_run(whole, folder, ranks)
        classes = dataset.train.num_classes
        if ranks.first:
            trials.mkdir(exist_ok=True)
            save(config, trials / "config.yaml")
        compared = list[dict[str, Any]]()
        if classes >= FEWEST_CLASSES:
            short = trial_of(config, "preset", classes).optim.iterations
            if not quiet and ranks.first:
                tell(
                    f"comparing {len(CANDIDATES)} ways to train a transformer on held-out classes, {short} iterations each "
                    "(any setting of the optimizer, such as optim.lr, omits this)"
                )
            for number, name in enumerate(CANDIDATES):
                trial = replace(hooks, on_log=None, on_evaluate=None)
                if not quiet and ranks.first:
                    tell(f"{number + 1} of {len(CANDIDATES)}: {name}")
                scores = _scores(trial_of(config, name, classes), folder, trials / str(number), trial, quiet)
                compared.append({"candidate": name, "iterations": short, **scores})
        # of equal ones the first; the first is also that of data with few classes
        best = max(compared, key=lambda each: each[SCORE], default={"candidate": next(iter(CANDIDATES))})["candidate"]
        chosen = with_candidate(config, best)
        if ranks.first:
            write_json(folder / RESULT, {"chosen": best, "compared": compared}, checksum=True)
            save(chosen, folder / "config.yaml")
            shutil.rmtree(trials)
            if compared and not quiet:
                found = ", ".join(f"{each['candidate']}: {100 * each[SCORE]:.1f}" for each in compared)
                tell(f"chosen: {best} (MAP@R on held-out classes in percent: {found})")
        ranks.wait()
    return chosen


def undecided(folder: Path) -> bool:
    """Whether the run in a folder was stopped while its candidates were compared."""
    return (folder / FOLDER / "config.yaml").exists() and not (folder / "config.yaml").exists()


def undecided_config(folder: Path) -> Config:
    """The config of such a run, before the choice."""
    return load(folder / FOLDER / "config.yaml")


def _scores(config: Config, run: Path, folder: Path, hooks: Hooks, quiet: bool) -> dict[str, float]:
    """R@1 and MAP@R of a trial, from its results if it is finished; below all others if it diverged."""
    ranks = the_ranks()
    if ranks.first and not (folder / "config.yaml").exists():
        folder.mkdir(exist_ok=True)
        if (run / SPLIT).exists():  # the images were checked once, for all trials
            write_bytes(folder / SPLIT, (run / SPLIT).read_bytes(), checksum=True)
        save(config, folder / "config.yaml")
    ranks.wait()
    try:
        finished = (folder / "result.json").exists()
        result = read_json(folder / "result.json") if finished else train(config, folder, resume=True, quiet=quiet, hooks=hooks)
    except DivergedError:
        return {"recall@1": -1.0, SCORE: -1.0}
    gc.collect()  # of the trial's model and memory, before the next ones are built
    if ranks.first:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return {name: float(result[name]) for name in ("recall@1", SCORE)}
