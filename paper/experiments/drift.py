"""Slow drift: how far embeddings move, with pairs and under classification (Figure 3, S-Figure 1), and Lemma 1."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from paper import published
from paper.experiment import OFF, SCRATCH, SMALL, Arm, Experiment, Setting, contrastive, queue
from paper.page import Block, Claim, Figure, Table
from paper.record import Record, digits
from paper.study import Study
from xbm.memory import CrossBatchMemory
from xbm_app.data.feeds import Batches
from xbm_app.files import read_checkpoint, write_checkpoint
from xbm_app.models import EmbeddingModel, build_model
from xbm_app.report.printed_figures import drift_panel, drift_table
from xbm_app.report.writing import percent
from xbm_app.train.config import Config
from xbm_app.train.dataset import augmentation_of, begin_run, feed_of, read_run, sampler_of
from xbm_app.train.metrics import Drift
from xbm_app.train.state import RunState, pick_device

CROSS_ENTROPY = "cross_entropy"  # loss.name of a run that trains a classifier
PROBES = 64  # images whose drift is measured while a classifier is trained
STEPS = (10, 100, 1000)  # Δt of the old embeddings in Lemma 1
PAIRS = 16  # anchors in Lemma 1, and negatives of each


def _scratch(setting: Setting) -> dict[str, Any]:
    rate = 1e-3 if setting.data in SMALL else 3e-4
    return {**SCRATCH, "loss.name": "contrastive", "optim.lr": rate}


def drift_arms(setting: Setting) -> list[Arm]:
    """From scratch over 6,000 iterations as in the paper's figure, from pretrained weights, and with a classifier."""
    scratch = {**_scratch(setting), **OFF}
    classification = {**scratch, "loss.name": CROSS_ENTROPY, "batch.sampler": "shuffle"}
    arms = [
        Arm("from scratch, contrastive", scratch, choose=None, seeds=1),
        Arm("from scratch, classification", classification, choose=None, seeds=1),
    ]
    if setting.data not in SMALL:
        without, _ = contrastive(setting)
        arms += [
            replace(without, label="pretrained, contrastive", seeds=1),
            replace(queue(setting), label="pretrained, contrastive, queue", seeds=1),
        ]
    return arms


def draw_drift(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        first_runs = [(arm.label, runs[0]) for arm in study.arms if (runs := study.finished(arm))]
        panels = [panel for label, run in first_runs if (panel := drift_panel(label, run.curves))["lines"]]
        if not panels:
            continue
        caption = (
            "Mean squared distance between the embeddings of a fixed image now and Δt iterations ago, in eval mode, "
            f"{study.setting.label}. Dotted lines: the learning rate is divided by 10. For classification, the embeddings are "
            "the normalized features of the pooling layer."
        )
        header = ["D, mean of a stretch", "Δt", "first tenth", "before the decay", "after the decay"]
        rows = [row for label, run in first_runs for row in drift_table(label, run.curves)]
        blocks += [Figure(f"drift_{study.setting.slug}", {"panels": panels}, caption), Table(header, rows)]
        blocks += [_stable(f"{study.setting.where}, {label}", run) for label, run in first_runs]
    return [block for block in blocks if block]


def verdicts(record: Record) -> dict[str, tuple[bool, str]]:
    """The paper's three sentences by the curves of a run from scratch, each with its figures; empty without enough points.
    Small: D(10) never exceeds half the peak of D(1000). Stable: the means from iteration 3,000 to the decay are below half the
    peaks. Decay: the means after it (Δt later) are below half of those."""
    curves = {delta: [np.array(v) for v in record.curve(f"drift_{delta}")] for delta in STEPS}
    decay = min((step for step in record.config["optim.decay_at"] if step > published.STABLE_AFTER), default=0)
    if not decay or any(len(y) < 4 for _, y in curves.values()):
        return {}
    peaks = {delta: float(y.max()) for delta, (_, y) in curves.items()}
    stable, slower = list[tuple[float, float]](), list[tuple[float, float]]()
    for delta in (100, 1000):
        x, y = curves[delta]
        before, after = y[(x >= published.STABLE_AFTER) & (x < decay)], y[x >= decay + delta]
        if not (len(before) and len(after)):
            return {}
        stable.append((float(before.mean()), peaks[delta]))
        slower.append((float(after.mean()), float(before.mean())))
    found = {"small": (peaks[10] < peaks[1000] / 2, f"D(10) peaks at {peaks[10]:.2g}, D(1000) at {peaks[1000]:.2g}")}
    for name, pairs in (("stable", stable), ("decay", slower)):
        text = ", ".join(f"D({delta}) {high:.2g} → {low:.2g}" for delta, (low, high) in zip((100, 1000), pairs))
        found[name] = (all(low < high / 2 for low, high in pairs), text)
    return found


def _stable(label: str, record: Record) -> Claim:
    names = {"small": "small at Δt = 10", "stable": "stable after 3,000 iterations", "decay": "slower after the decay"}
    found = verdicts(record) if "from scratch" in label else {}
    parts = [f"{names[name]}: {'yes' if right else 'no'} ({text})" for name, (right, text) in found.items()]
    return Claim(f"{label} (R@1 {percent(record.score())}): {'; '.join(parts)}." if parts else "")


# ------------------------------------------------------------------ drift of a classifier (supplementary, section 3)


class Pooled(nn.Module):
    """The normalized features of a model's global pooling layer, whose drift is measured."""

    def __init__(self, model: EmbeddingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.pooled(images)


def classify(config: Config, folder: Path) -> dict[str, Any]:
    """Trains a classifier of the training classes with cross entropy, without any pairs.

    An interrupted run resumes from the last checkpoint in `folder`.

    Returns:
        The values of the result file, with curves of loss, accuracy and drift.
    """
    last = folder / "checkpoints" / "last.pt"
    dataset = read_run(config, folder) if last.exists() else begin_run(config, folder)
    device = pick_device(config.device)
    torch.manual_seed(config.seed)
    channels = 1 if config.model.trunk == "small" else 3
    model = build_model(config.model.trunk, dataset.train.num_classes, config.model.pooling, config.model.weights, channels).to(
        device, memory_format=torch.channels_last
    )  # type: ignore[call-overload]
    feed = feed_of(dataset.train, config, augmentation_of(config, model), device)
    sampler = sampler_of(dataset.train, config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay)
    probes = np.linspace(0, len(feed) - 1, min(PROBES, len(feed))).astype(np.int64)
    drift = Drift(feed.test(probes).to(device), model.head.in_features, config.log.every).to(device)
    pooled, half = Pooled(model), device.type == "cuda"
    tally = torch.zeros(2, device=device)  # sums of loss and accuracy since the last logged line
    curves: dict[str, list[float | None]] = {name: [] for name in ("step", "lr", "loss", "accuracy")}
    curves |= {f"drift_{delta}": [] for delta in drift.steps}
    start = 0
    if last.exists():
        state = read_checkpoint(last, device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        drift.load_state_dict(state["drift"])
        start, curves, tally = state["step"], state["curves"], state["tally"]

    for step, images, labels, _ in Batches(feed, sampler, start, config.optim.iterations, device=device):
        lr = config.optim.lr * 0.1 ** sum(step >= decay for decay in config.optim.decay_at)
        for group in optimizer.param_groups:
            group["lr"] = lr
        model.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = model.logits(images)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        tally += torch.stack([loss.detach(), (logits.argmax(1) == labels).float().mean()])
        done = step + 1
        moved = drift(done, pooled)
        if done % config.log.every == 0:
            means = (tally / config.log.every).tolist()
            tally.zero_()
            line = {"step": step, "lr": lr, "loss": means[0], "accuracy": means[1]}
            line |= {f"drift_{delta}": float(value) for delta, value in moved.items()}
            for name, values in curves.items():
                values.append(digits(line[name]) if name in line else None)
        if done % config.log.checkpoint_every == 0 or done == config.optim.iterations:
            state = {"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "curves": curves}
            write_checkpoint(last, {**state, "drift": drift.state_dict(), "tally": tally})
    return {
        "data": {"name": dataset.name, "train_images": len(feed), "train_classes": dataset.train.num_classes},
        "iterations": config.optim.iterations,
        "scores": {},
        "curves": curves,
    }


# ------------------------------------------------------------------ Lemma 1
# For one negative pair, L = v_i · v_j with v_j constant, the gradient with respect to the weights is J_iᵀ v_j, where
# J_i = ∂v_i/∂θ. With an old embedding ṽ_j instead of v_j, its error is J_iᵀ (v_j − ṽ_j), so
#
#     ‖J_iᵀ (v_j − ṽ_j)‖² ≤ C_i · ε_j,    C_i = σ_max(J_i)²,    ε_j = ‖v_j − ṽ_j‖²
# C_i depends on the anchor and the weights only. Power iteration finds it independently of the errors.

Weights = dict[str, Tensor]


def lemma_arms(setting: Setting) -> list[Arm]:
    pretrained = queue(setting)
    settings = {
        **_scratch(setting), **pretrained.settings, "optim.iterations": 2000, "optim.decay_at": (), "memory.start": 0
    }  # fmt: skip
    scratch = Arm("from scratch, contrastive, queue", settings, choose=None, measures=("lemma",), seeds=1)
    return [replace(pretrained, seeds=1), scratch]


def stages(config: Config, measures: tuple[str, ...]) -> list[int]:
    """The iterations at which training pauses to keep a copy of the model: Lemma 1 needs old ones."""
    end = config.optim.iterations
    return [end - step for step in reversed(STEPS) if end > step] + [end] if "lemma" in measures else [end]


def snapshot(folder: Path, before: int) -> Path:
    """The model as it was this many iterations before the end."""
    return folder / "checkpoints" / f"before_{before}.pt"


def embedding_of(model: nn.Module, image: Tensor) -> tuple[Callable[[Weights], Tensor], Weights]:
    """v_i as a function of the weights, and the current weights. The model must be in eval mode."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def embed(values: Weights) -> Tensor:
        return functional_call(model, {**values, **buffers}, (image[None],))[0]  # (D,)

    return embed, weights


def largest_singular_value_squared(
    embed: Callable[[Weights], Tensor], weights: Weights, most: int = 100, tolerance: float = 1e-4, seed: int = 0
) -> float:
    """σ_max(∂embed/∂θ)² by power iteration on J Jᵀ, which is only D × D and is never materialized.

    Every estimate ‖Jᵀu‖² with a unit vector u is a lower bound. The iteration stops when the estimate grows by less than a
    fraction `tolerance`.
    """
    v, pull = vjp(embed, weights)  # type: ignore[misc]
    u = torch.randn(v.shape, generator=torch.Generator().manual_seed(seed), dtype=v.dtype).to(v.device)
    u = u / u.norm()
    best = 0.0
    for _ in range(most):
        (back,) = pull(u)
        estimate = float(sum(part.square().sum() for part in back.values()))
        _, forth = jvp(embed, (weights,), (back,))  # type: ignore[misc]  # J Jᵀ u
        length = forth.norm()
        if estimate - best <= tolerance * estimate or float(length) == 0:
            return max(estimate, best)
        best, u = estimate, forth / length
    return best


def gradient_errors(embed: Callable[[Weights], Tensor], weights: Weights, differences: Tensor) -> Tensor:
    """(n,): ‖J_iᵀ d‖² for each difference d = v_j − ṽ_j of `differences` (n, D)."""
    _, pull = vjp(embed, weights)  # type: ignore[misc]
    errors = [sum(part.square().sum() for part in pull(d)[0].values()) for d in differences]
    return torch.stack([torch.as_tensor(error) for error in errors])


def measure_lemma(run: RunState) -> dict[str, Any]:
    """Per pair ε and the squared error of the gradient, and C per anchor; for older models and for the rows of the memory."""
    labels = np.asarray(run.dataset.train.labels)
    draw = np.random.default_rng(run.config.seed)
    anchors = draw.permutation(len(labels))[:PAIRS]
    negatives = np.stack([draw.permutation(np.flatnonzero(labels != labels[a]))[:PAIRS] for a in anchors])  # (n, k)
    flat = negatives.reshape(-1)

    @torch.no_grad()
    def embed(indices: np.ndarray) -> torch.Tensor:
        parts = [run.model(run.data.feed.test(part).to(run.device)) for part in np.array_split(indices, -(-len(indices) // 64))]
        return torch.cat(parts)

    now = embed(flat)
    differences = {}
    if isinstance(run.memory, CrossBatchMemory):
        slots = run.memory.latest_copies(torch.from_numpy(flat).to(run.device))
        rows = run.memory.rows.detach()[slots.clamp(min=0)].float()
        differences["memory"] = torch.where(slots[:, None] >= 0, now - rows, torch.nan)
    present = {name: value.clone() for name, value in run.model.state_dict().items()}
    for step in STEPS:
        if snapshot(run.folder, step).exists():
            run.model.load_state_dict(read_checkpoint(snapshot(run.folder, step), run.device)["model"])
            differences[str(step)] = now - embed(flat)
    run.model.load_state_dict(present)

    bounds: list[float] = []
    pairs: dict[str, dict[str, list[float]]] = {name: {"anchor": [], "epsilon": [], "error": []} for name in differences}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for a, index in enumerate(anchors):
            f, weights = embedding_of(run.model, run.data.feed.test(np.array([index])).to(run.device)[0])
            bounds.append(digits(largest_singular_value_squared(f, weights)))
            for name, all_differences in differences.items():
                d = all_differences[a * PAIRS : (a + 1) * PAIRS]
                d = d[torch.isfinite(d).all(1)]  # images that are not in the memory
                pairs[name]["anchor"] += [a] * len(d)
                pairs[name]["epsilon"] += [digits(x) for x in d.square().sum(1).tolist()]
                pairs[name]["error"] += [digits(x) for x in gradient_errors(f, weights, d).tolist()] if len(d) else []
    return {"C": bounds, "pairs": pairs}


def draw_lemma(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        rows, panels, claims = [], [], []
        for arm in study.arms:
            measured = study.measurement(arm, "lemma")
            if measured is None:
                continue
            C = np.array(measured["C"])
            within: list[np.ndarray] = []
            lines: list[dict[str, Any]] = []
            for colour, (source, pairs) in enumerate(measured["pairs"].items()):
                error, bound = np.array(pairs["error"]), C[pairs["anchor"]] * np.array(pairs["epsilon"])
                if not len(error):
                    continue
                name = "rows of the memory" if source == "memory" else f"Δt = {source}"
                within.append(error <= bound * 1.001)  # power iteration ends slightly below C
                ratio = np.median(error[bound > 0] / bound[bound > 0])
                rows.append([
                    f"{arm.label}, {name}", str(len(error)), _number(np.mean(pairs["epsilon"])), _number(error.mean()),
                    _number(bound.mean()), f"{ratio:.2g}", f"{100 * within[-1].mean():.1f} %",
                ])  # fmt: skip
                positive = (error > 0) & (bound > 0)
                x, y = ([float(f"{v:.3g}") for v in each[positive]] for each in (bound, error))
                lines.append({"label": name, "x": x, "y": y, "points": True, "colour": colour})
            share = 100 * np.concatenate(within).mean() if within else math.nan
            claims.append(
                Claim(
                    f"{study.setting.where}, {arm.label}: the error of a gradient stays within C · ε for {share:.1f} % of "
                    f"the pairs. The median of C = σ_max² over {len(C)} anchors is {_number(np.median(C))} "
                    f"({_number(C.min())} to {_number(C.max())}); it is below 1, as the paper observed, for {(C < 1).sum()} "
                    "of them."
                )
            )
            values = [v for line in lines for axis in ("x", "y") for v in line[axis]]
            if values:
                ends = [min(values), max(values)]
                axes = {"x": "C · ε", "y": "‖gradient error‖²", "y_log": True, "x_log": 10, "diagonal": ends}
                panels.append({"title": arm.label, "lines": lines, **axes})
        if rows:
            caption = f"Lemma 1 pair by pair, {study.setting.label}: squared error of the gradient against its bound."
            figure = Figure(f"lemma-1_{study.setting.slug}", {"panels": panels}, caption)
            header = ["", "pairs", "mean ε", "mean error²", "mean C · ε", "error² / bound, median", "bound holds"]
            blocks += [figure, Table(header, rows), *claims]
    return blocks


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


EXPERIMENTS = (
    Experiment(
        "drift", "Slow drift: from scratch, from pretrained weights, and under classification",
        "Figure 3; supplementary, Figure 1", ("sop",), drift_arms, draw_drift,
    ),
    Experiment(
        "lemma-1", "The error of a gradient against C · ε, pair by pair", "Lemma 1; supplementary, section 5", ("sop",),
        lemma_arms, draw_lemma,
    ),
)  # fmt: skip
