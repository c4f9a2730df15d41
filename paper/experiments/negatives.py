"""Negatives: how many are valid (Figure 4), how losses weigh them (section 4.3), how hard they push compared with the pull of
positives, and which images are mined and retrieved (Figures 5 and 7)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paper import published
from paper.experiment import Arm, Experiment, Setting, contrastive, loss_arms, queue
from paper.page import Block, Claim, Figure, Pictures, Table, Tile
from paper.record import digits
from paper.study import Study
from xbm.losses import LOSSES, PairLoss
from xbm_app.report.writing import MISSING, percent
from xbm_app.train.config import override
from xbm_app.train.dataset import read_run
from xbm_app.train.losses import pair_loss
from xbm_app.train.state import RunState

ROWS = 6  # of a contact sheet
SOURCES = (("from the batch", "valid_negatives_batch"), ("from the memory", "valid_negatives_memory"))
EDGES = tuple(round(0.05 * k, 2) for k in range(21))  # bins of similarity, 0 to 1
VERY_HARD = 0.8  # a negative as similar as this may be mislabeled (S-Figure 3)
WEIGHED = 32  # anchors whose pairs are weighed
ANCHORS, NEGATIVES = 16, 10  # mined: enough anchors for several classes
QUERIES, RETRIEVED = 400, 5  # the same random queries in every run on the same data


@torch.no_grad()
def next_batch(run: RunState) -> tuple[Tensor, Tensor, Tensor]:
    """The batch that would follow the last iteration: ids, embeddings in eval mode, and the labels of all training images."""
    indices = run.data.sampler.batch(run.data.batches_per_step * run.config.optim.iterations)
    anchors = run.model(run.data.feed.test(indices).to(run.device)).float().cpu()
    return torch.from_numpy(indices), anchors, torch.from_numpy(np.asarray(run.dataset.train.labels))


def _queue(setting: Setting) -> list[Arm]:
    return [replace(queue(setting), seeds=1)]


def draw_valid(data: str, studies: Sequence[Study]) -> list[Block]:
    """Valid negatives per iteration from batch and memory, over time."""
    panels, rows, claims = [], [], list[Claim]()
    few, many = published.VALID_NEGATIVES
    for study in studies:
        (arm,) = _queue(study.setting)
        for record in study.finished(arm)[:1]:
            lines = []
            row = [study.setting.trunk]
            for colour, (name, key) in enumerate(SOURCES):
                x, y = record.curve(key)
                points = [(step, value) for step, value in zip(x, y) if value > 0]
                lines.append({
                    "label": name, "x": [step for step, _ in points], "y": [value for _, value in points], "colour": colour,
                    "marker": False,
                })  # fmt: skip
                last_quarter = y[len(y) * 3 // 4 :]
                row += [f"{np.mean(values):,.0f}" if values else MISSING for values in (y, last_quarter)]
            panels.append(
                {"title": study.setting.trunk, "x": "iteration", "y": "valid negatives", "y_log": True, "lines": lines}
            )
            rows.append(row)
            claims.append(
                Claim(
                    f"{study.setting.where}: {row[2]} valid negatives per iteration from the batch and {row[4]} from the "
                    f"memory in the last quarter (the paper, SOP with GoogLeNet: fewer than {few} and about {many:,})."
                )
            )
    if not rows:
        return []
    caption = "Negatives with a non-zero gradient per iteration, contrastive with a queue of the whole training set."
    header = ["valid negatives per iteration", "batch, mean", "batch, last quarter", "memory, mean", "memory, last quarter"]
    return [Figure(f"valid-negatives_{data}", {"panels": panels}, caption), Table(header, rows), *claims]


# ------------------------------------------------------------------ how losses weigh


def _weighed(setting: Setting) -> list[Arm]:
    return [replace(arm, seeds=1) for arm in loss_arms(setting) if "outliers" in arm.measures]


def weight_shares(loss: PairLoss, S: Tensor, positive: Tensor, negative: Tensor) -> dict[str, object]:
    """How the weight of an anchor's valid negatives is distributed, averaged over the anchors that have any.

    Args:
        S: (m, M) similarities; `positive`, `negative`: (m, M) masks.

    Returns:
        hardest: share of the hardest negative. very_hard: share of those above 0.8. very_hard_count: their share by count.
        effective: e^entropy of the shares, the effective number of negatives. valid: number of negatives with a weight.
        bins: share of the weight by similarity, see EDGES.
    """
    weights = loss.weights(S, positive, negative).where(negative, torch.zeros((), dtype=S.dtype)).clamp(min=0)
    has_valid = weights.sum(1) > 0
    w, s = weights[has_valid].double(), S[has_valid].double()
    if not len(w):
        return {"anchors": 0}
    valid = w > 0
    share = w / w.sum(1, keepdim=True)
    hardest = share.gather(1, s.masked_fill(~valid, -torch.inf).argmax(1, keepdim=True))[:, 0]
    very_hard = valid & (s > VERY_HARD)
    entropy = -(share * share.clamp(min=1e-300).log()).sum(1)
    bins = torch.bucketize(s, torch.tensor(EDGES[1:-1], dtype=s.dtype))
    by_bin = torch.zeros(len(s), len(EDGES) - 1, dtype=s.dtype).scatter_add_(1, bins, share)
    return {
        "anchors": len(w),
        "hardest": float(hardest.mean()),
        "very_hard": float((share * very_hard).sum(1).mean()),
        "very_hard_count": float((very_hard.sum(1) / valid.sum(1)).mean()),
        "effective": float(entropy.exp().mean()),
        "valid": float(valid.sum(1).double().mean()),
        "bins": [round(float(x), 6) for x in by_bin.mean(0)],
    }


def measure_weights(run: RunState) -> dict[str, Any]:
    """How three losses weigh the same negatives of the memory (the weights w_ij of the paper's Eq. 1)."""
    if run.memory is None:
        return {}
    batch_ids, batch, labels = next_batch(run)
    anchor_ids, anchors = batch_ids[:WEIGHED], batch[:WEIGHED]
    bank, ids = run.memory.embeddings.detach().float().cpu(), run.memory.ids.cpu()
    same = labels[anchor_ids][:, None] == labels[ids]
    own = anchor_ids[:, None] == ids
    names = ("contrastive", "triplet", "multi_similarity")
    return {name: weight_shares(LOSSES[name](), anchors @ bank.T, same & ~own, ~same) for name in names}


def draw_outliers(data: str, studies: Sequence[Study]) -> list[Block]:
    """How three losses would weigh the same negatives of one trained model's memory."""
    rows, panels, claims = [], [], list[Claim]()
    middles = [round((a + b) / 2, 3) for a, b in pairwise(EDGES)]
    for study in studies:
        for arm in study.arms:
            by_loss = study.measurement(arm, "outliers")
            if by_loss is None:
                continue
            by_loss = {loss: shares for loss, shares in by_loss.items() if shares.get("anchors")}
            if arm.label.startswith("MS") and {"contrastive", "multi_similarity"} <= by_loss.keys():
                ms, plain = (percent(by_loss[loss]["hardest"]) for loss in ("multi_similarity", "contrastive"))
                claims.append(
                    Claim(
                        f"{study.setting.where}, {arm.label}: of the weight of an anchor's negatives, multi-similarity gives "
                        f"{ms} % to the hardest one, contrastive {plain} %."
                    )
                )
            lines = []
            for loss, shares in by_loss.items():
                name = loss.replace("_", "-")
                rows.append([
                    f"{study.setting.trunk}, {arm.label}: weighed by {name}", f"{shares['valid']:,.0f}",
                    f"{shares['effective']:,.1f}", percent(shares["hardest"]), percent(shares["very_hard"]),
                    percent(shares["very_hard_count"]),
                ])  # fmt: skip
                lines.append({"label": name, "x": middles, "y": shares["bins"], "marker": False})
            panels.append({
                "title": f"{study.setting.trunk}, {arm.label}", "x": "similarity of the negative", "y": "share of the weight",
                "lines": lines,
            })  # fmt: skip
    if not rows:
        return []
    header = [
        "per anchor", "valid negatives", "effective negatives", "hardest one's share, %", "share above 0.8, %",
        "above 0.8 by count, %",
    ]  # fmt: skip
    caption = "Distribution of the weight of the memory's negatives by similarity; all losses see the same pairs."
    note = (
        "The paper says that multi-similarity gains less from the memory because it gives large weights to extremely hard "
        "negatives, which may be outliers. The number of effective negatives is e to the entropy of the weights: with equal "
        "weights it is the number of negatives."
    )
    return [Figure(f"ms-outliers_{data}", {"panels": panels}, caption), Table(header, rows), note, *claims]


# ------------------------------------------------------------------ the components of a gradient


def measure_shares(run: RunState) -> dict[str, Any]:
    """The components of an anchor's gradient: pull and push, from the batch and from the memory.

    Returns:
        batch, memory: mean norms and total weights of pull and push. age: median age of the rows and of the valid negatives.
        false: share of the memory's push that acts on images with the anchor's true class, which `data.noise` mislabeled.
    """
    right = read_run(override(run.config, {"data.noise": 0.0}), run.folder)
    return gradient_shares(run, right.train.labels)


@torch.no_grad()
def gradient_shares(run: RunState, true_labels: np.ndarray) -> dict[str, Any]:
    """See `measure_shares`."""
    ids, anchors, labels = next_batch(run)
    truth = torch.from_numpy(np.asarray(true_labels))
    batch_loss, memory_loss = pair_loss(run.config), pair_loss(run.config, run.config.reduction)
    shares: dict[str, Any] = {"batch": _components(batch_loss, anchors, labels[ids], ids, anchors, labels[ids], ids)[0]}
    if run.memory is not None and len(run.memory):
        rows, row_ids = run.memory.embeddings.float().cpu(), run.memory.ids.cpu()
        shares["memory"], push = _components(memory_loss, anchors, labels[ids], ids, rows, labels[row_ids], row_ids)
        ages = run.memory.ages.cpu()
        same = truth[ids][:, None] == truth[row_ids]
        valid = (push > 0).nonzero()[:, 1]
        shares["age"] = {"rows": float(ages.median()), "valid negatives": float(ages[valid].median()) if len(valid) else None}
        shares["false"] = digits((push * same).sum() / push.sum()) if bool(push.sum() > 0) else None
    return shares


def _components(
    loss: PairLoss, anchors: Tensor, labels: Tensor, ids: Tensor, rows: Tensor, row_labels: Tensor, row_ids: Tensor
) -> tuple[dict[str, float], Tensor]:
    """Mean norms and weights of pull and push, and the weights of the negatives (m, M)."""
    same, other = labels[:, None] == row_labels, ids[:, None] != row_ids
    weights = loss.weights(anchors @ rows.T, same & other, ~same & other)
    sides = {"pull": weights * same, "push": weights * ~same}
    norms = {name: digits((side @ rows).norm(dim=1).mean()) for name, side in sides.items()}
    return {**norms, **{f"{name}_weight": digits(side.sum(1).mean()) for name, side in sides.items()}}, sides["push"]


# ------------------------------------------------------------------ pictures


def measure_mined(run: RunState) -> dict[str, Any]:
    """Anchors with their negatives, as the supplementary's figures 2 and 3 show them.

    Returns:
        uniform: the anchors of the run's own `examples.npz` with enough negatives above 0.5 in the memory, which are evenly
            spaced from hard to simple. hardest: anchors whose hardest negative exceeds 0.8, with the ten hardest.
    """
    if run.memory is None or not len(run.memory):
        return {"uniform": [], "hardest": []}
    with np.load(run.folder / "examples.npz", allow_pickle=False) as examples:
        mined = {name: examples[f"mined_{name}"] for name in ("anchor", "positive", "batch", "batch_s", "memory", "memory_s")}
    uniform = [_mined_example(mined, k) for k in range(len(mined["anchor"])) if (mined["memory_s"][k] > 0.5).all()]
    anchor_ids, anchors, labels = next_batch(run)
    bank, ids = run.memory.embeddings.detach().float().cpu(), run.memory.ids.cpu()
    hardest: list[dict[str, Any]] = []
    for a in torch.randperm(len(anchors), generator=torch.Generator().manual_seed(0)).tolist():  # not class by class
        own, anchor = int(anchor_ids[a]), anchors[a]
        memory = _hardest(anchor, bank, ids, labels, own)
        if memory and memory[0][1] > VERY_HARD and len(hardest) < ANCHORS:
            others = (labels == labels[own]).nonzero()[:, 0]
            positive = int(others[others != own][0]) if len(others) > 1 else own
            batch = _hardest(anchor, anchors, anchor_ids, labels, own)
            hardest.append({"anchor": own, "positive": positive, "batch": batch, "memory": memory})
    return {"uniform": uniform, "hardest": hardest}


def _mined_example(mined: dict[str, np.ndarray], k: int) -> dict[str, Any]:
    pools = {
        pool: [(int(i), round(float(s), 4)) for i, s in zip(mined[pool][k], mined[f"{pool}_s"][k]) if i >= 0]
        for pool in ("batch", "memory")
    }
    return {"anchor": int(mined["anchor"][k]), "positive": int(mined["positive"][k]), **pools}


def _hardest(anchor: Tensor, pool: Tensor, ids: Tensor, labels: Tensor, own: int) -> list[tuple[int, float]]:
    """(image, similarity) of the hardest negatives in a pool; an image that occurs twice counts once."""
    negative = labels[ids] != labels[own]
    s, ids = pool[negative] @ anchor, ids[negative]
    best: dict[int, float] = {}
    for image, similarity in zip(*(each[s.argsort(descending=True)].tolist() for each in (ids, s))):
        best.setdefault(image, round(similarity, 4))
    return list(best.items())[:NEGATIVES]


def draw_mined(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        (arm,) = _queue(study.setting)
        mined = study.measurement(arm, "mined")
        if mined is None:
            continue
        for kind, title in (
            ("uniform", "Negatives of the memory above 0.5, evenly spaced from hard to simple"),
            ("hardest", "The ten hardest negatives of anchors whose hardest exceeds 0.8"),
        ):
            one_per_class = {example["positive"]: example for example in mined[kind]}  # the anchors of a class share it
            rows = [_mined_row(example) for example in one_per_class.values()][:ROWS]
            caption = (
                f"{title}; {study.setting.label}. Yellow: the anchor. Green: a positive. Gray: the hardest negatives of its "
                "batch. Purple: those of the memory. Random anchors, one per class."
            )
            if rows:
                blocks.append(Pictures(f"mined-{kind}_{study.setting.slug}", data, rows, caption))
            else:
                blocks.append(f"{study.setting.trunk}, {kind}: no anchor of the batch had such negatives.")
    return blocks


def _mined_row(example: dict[str, Any]) -> list[Tile]:
    row = [Tile("train", example[kind], kind, kind) for kind in ("anchor", "positive")]
    row += [Tile("train", image, "batch", f"{s:.2f}") for image, s in example["batch"][:3]]
    return row + [Tile("train", image, "memory", f"{s:.2f}") for image, s in example["memory"]]


def _pair(setting: Setting) -> list[Arm]:
    return [replace(arm, seeds=1) for arm in contrastive(setting)]


def measure_retrieved(run: RunState, seed: int = 0) -> dict[str, Any]:
    """What some queries retrieve; the queries are random and the same in every run on the same data."""
    with np.load(run.folder / "examples.npz", allow_pickle=False) as examples:
        neighbours, similarities = examples["neighbours"], examples["similarities"]  # (Q, k), nearest first
    protocol = run.dataset.protocols[0]
    gallery = protocol.query if protocol.gallery is None else protocol.gallery
    queries = np.random.default_rng(seed).permutation(len(protocol.query))[:QUERIES]
    nearest = neighbours[queries][:, :RETRIEVED]
    right = np.asarray(gallery.labels)[nearest] == np.asarray(protocol.query.labels)[queries][:, None]
    return {
        "queries": queries.tolist(),
        "neighbours": nearest.tolist(),
        "similarities": np.round(similarities[queries][:, :RETRIEVED].astype(float), 3).tolist(),
        "right": right.astype(int).tolist(),
    }


def draw_retrieved(data: str, studies: Sequence[Study]) -> list[Block]:
    """The same queries without and with memory: where the memory wins, and where both fail."""
    blocks: list[Block] = []
    for study in studies:
        without, with_memory = (study.measurement(arm, "retrieved") for arm in study.arms)
        if without is None or with_memory is None or without["queries"] != with_memory["queries"]:
            continue
        first = [(a[0], b[0]) for a, b in zip(without["right"], with_memory["right"])]
        wins, fails = ([k for k, pair in enumerate(first) if pair == kind] for kind in ((0, 1), (0, 0)))
        lost, both = first.count((1, 0)), first.count((1, 1))
        blocks.append(
            f"{study.setting.label}: of {len(first)} random queries, the nearest image is right in both runs for {both}, only "
            f"with memory for {len(wins)}, only without for {lost}, in neither for {len(fails)}."
        )
        for kind, chosen, text in (("wins", wins, "right with memory and wrong without"), ("fails", fails, "wrong in both")):
            runs = (("without", without), ("with", with_memory))
            rows = [row for k in chosen[:ROWS] for row in (*(_retrieved_row(run, k, name) for name, run in runs), [])][:-1]
            caption = (
                f"Top 5 without memory (first row of each pair) and with memory (second), for queries whose nearest image is "
                f"{text}; {study.setting.label}. Green: same class as the query. Purple: another class."
            )
            if rows:
                blocks.append(Pictures(f"retrieved-{kind}_{study.setting.slug}", data, rows, caption))
    return blocks


def _retrieved_row(run: dict[str, Any], k: int, name: str) -> list[Tile]:
    row = [Tile("query", run["queries"][k], "anchor", name)]
    for image, right, s in zip(run["neighbours"][k], run["right"][k], run["similarities"][k]):
        # a word as well as a color
        row.append(Tile("gallery", image, "right" if right else "wrong", f"{s:.2f} right" if right else f"{s:.2f}"))
    return row


EXPERIMENTS = (
    Experiment("valid-negatives", "Valid negatives per iteration", "Figure 4", ("sop",), _queue, draw_valid),
    Experiment(
        "ms-outliers", "How heavily multi-similarity weighs outliers", "section 4.3", ("sop",), _weighed, draw_outliers
    ),
    Experiment(
        "mined", "Negatives mined from the memory, as pictures", "Figure 5; supplementary, Figures 2 and 3",
        ("sop", "inshop", "vehicleid"), _queue, draw_mined,
    ),
    Experiment(
        "retrieved", "Retrieved images without and with memory", "Figure 7; supplementary, Figures 4 and 5",
        ("sop", "inshop", "vehicleid"), _pair, draw_retrieved,
    ),
)  # fmt: skip
