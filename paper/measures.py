"""What is measured on a finished run beyond its scores: by name, from its folder, as values a JSON file can hold."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paper.arms import PLAIN_QUEUE
from paper.lemma import embedding_of, gradient_errors, largest_singular_value_squared
from paper.mining import mined_negatives, retrieved
from paper.outliers import compare_losses
from paper.shares import gradient_shares
from paper.turns import in_turns
from xbm.errors import unknown
from xbm.losses import LOSSES
from xbm.memory import CrossBatchMemory
from xbm_app.train.checkpoint import read_checkpoint
from xbm_app.train.config import Config, override
from xbm_app.train.dataset import read_run
from xbm_app.train.job import Job

STEPS = (10, 100, 1000)  # Δt of the old embeddings in Lemma 1
PAIRS = 16  # anchors, and negatives of each
WEIGHED = 32  # anchors whose weights are looked at


def stages(config: Config, measures: tuple[str, ...]) -> list[int]:
    """Where training stops to keep the model as it is: Lemma 1 needs old ones."""
    end = config.optim.iterations
    return [end - step for step in reversed(STEPS) if end > step] + [end] if "lemma" in measures else [end]


def snapshot(folder: Path, before: int) -> Path:
    """The model as it was so many iterations before the end."""
    return folder / "checkpoints" / f"before_{before}.pt"


def measure(name: str, config: Config, folder: Path) -> Any:
    if name not in MEASURES:
        raise unknown("measure", name, MEASURES)
    return MEASURES[name](config, folder)


def _job(config: Config, folder: Path) -> Job:
    job = Job(config, read_run(config, folder), folder)
    job.restore()
    job.model.eval()
    return job


def lemma(config: Config, folder: Path) -> dict[str, Any]:
    """Per pair: ε, the gradient's error, and C of its anchor; for models of some steps ago and for the memory's rows."""
    job = _job(config, folder)
    labels = np.asarray(job.dataset.train.labels)
    draw = np.random.default_rng(config.seed)
    anchors = draw.permutation(len(labels))[:PAIRS]
    negatives = np.stack([draw.permutation(np.flatnonzero(labels != labels[a]))[:PAIRS] for a in anchors])  # (n, k)
    flat = negatives.reshape(-1)

    @torch.no_grad()
    def embed(indices: np.ndarray) -> torch.Tensor:
        parts = [job.model(job.feed.test(part).to(job.device)) for part in np.array_split(indices, -(-len(indices) // 64))]
        return torch.cat(parts)

    now = embed(flat)
    differences = {}
    if isinstance(job.memory, CrossBatchMemory):
        slots = job.memory.latest_copies(torch.from_numpy(flat).to(job.device))
        rows = job.memory.rows.detach()[slots.clamp(min=0)].float()
        differences["memory"] = torch.where(slots[:, None] >= 0, now - rows, torch.nan)
    present = {name: value.clone() for name, value in job.model.state_dict().items()}
    for step in STEPS:
        if snapshot(folder, step).exists():
            job.model.load_state_dict(read_checkpoint(snapshot(folder, step), job.device)["model"])
            differences[str(step)] = now - embed(flat)
    job.model.load_state_dict(present)

    bounds: list[float] = []
    pairs: dict[str, dict[str, list[float]]] = {name: {"anchor": [], "epsilon": [], "error": []} for name in differences}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for a, index in enumerate(anchors):
            f, weights = embedding_of(job.model, job.feed.test(np.array([index])).to(job.device)[0])
            bounds.append(_digits(largest_singular_value_squared(f, weights)))
            for name, all_differences in differences.items():
                d = all_differences[a * PAIRS : (a + 1) * PAIRS]
                d = d[torch.isfinite(d).all(1)]  # images that are not in the memory
                pairs[name]["anchor"] += [a] * len(d)
                pairs[name]["epsilon"] += [_digits(x) for x in d.square().sum(1).tolist()]
                pairs[name]["error"] += [_digits(x) for x in gradient_errors(f, weights, d).tolist()] if len(d) else []
    return {"C": bounds, "pairs": pairs}


@torch.no_grad()
def outliers(config: Config, folder: Path) -> dict[str, Any]:
    """How contrastive, triplet and multi-similarity weigh the same negatives of the memory."""
    job = _job(config, folder)
    indices = job.sampler.batch(job.batches_per_step * config.optim.iterations)[:WEIGHED]
    anchors = job.model(job.feed.test(indices).to(job.device)).float().cpu()
    train = torch.from_numpy(np.asarray(job.dataset.train.labels))
    if job.memory is None:
        return {}
    bank, ids = job.memory.embeddings.float().cpu(), job.memory.ids.cpu()
    same = train[torch.from_numpy(indices)][:, None] == train[ids]
    own = torch.from_numpy(indices)[:, None] == ids
    losses = {name: LOSSES[name]() for name in ("contrastive", "triplet", "multi_similarity")}
    with torch.enable_grad():
        return compare_losses(losses, anchors @ bank.T, same & ~own, ~same)  # type: ignore[arg-type]


def mined(config: Config, folder: Path) -> dict[str, Any]:
    return mined_negatives(_job(config, folder))


def found(config: Config, folder: Path) -> dict[str, Any]:
    """What some queries retrieve."""
    with np.load(folder / "examples.npz", allow_pickle=False) as examples:
        return retrieved(examples["neighbours"], examples["similarities"], _job(config, folder))


def shares(config: Config, folder: Path) -> dict[str, Any]:
    """What an anchor's gradient is made of."""
    job = _job(config, folder)
    right = read_run(override(config, {"data.noise": 0.0}), folder)
    return gradient_shares(job, right.train.labels)


def cost(config: Config, folder: Path) -> dict[str, Any]:
    """Seconds an iteration once everything is warm: the difference between the run and one of a sixth of its length."""
    from xbm_app.train.loop import train

    end = config.optim.iterations
    short = end // 6
    long_run = json.loads((folder / "result.json").read_text())
    with tempfile.TemporaryDirectory() as other:
        short_run = train(override(config, {"optim.iterations": short}), Path(other) / "run", quiet=True)
    elapsed = end * long_run["seconds_per_iteration"] - short * short_run["seconds_per_iteration"]
    return {"seconds_per_iteration": _digits(elapsed / (end - short)), "peak_memory_bytes": long_run["peak_memory_bytes"]}


def beside_queue(config: Config, folder: Path) -> dict[str, list[float]]:
    """Seconds a step, turn by turn: of the run's config, and of the plain queue, its pairs summed, otherwise the same."""
    taken = in_turns({"queue": override(config, PLAIN_QUEUE), "ours": config}, folder)
    return {name: [_digits(seconds) for seconds in each] for name, each in taken.items()}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


MEASURES: dict[str, Callable[[Config, Path], Any]] = {
    "lemma": lemma,
    "outliers": outliers,
    "mined": mined,
    "retrieved": found,
    "cost": cost,
    "beside_queue": beside_queue,
    "shares": shares,
}
