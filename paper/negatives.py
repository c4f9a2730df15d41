"""Experiments about negatives: how many are valid, how losses weigh them, and which images they and the retrieved ones are."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from paper import published
from paper.arms import contrastive, loss_arms, queue
from paper.blocks import Block, Claim, Figure, Pictures, Table, Tile, percent
from paper.experiment import Arm, Experiment, Setting
from paper.outliers import EDGES
from paper.study import Study

ROWS = 6  # of pictures
SOURCES = (("from the batch", "valid_negatives_batch"), ("from the memory", "valid_negatives_memory"))


def _queue(setting: Setting) -> list[Arm]:
    return [replace(queue(setting), seeds=1)]


def draw_valid(data: str, studies: Sequence[Study]) -> list[Block]:
    """Valid negatives per step from batch and memory, as they go."""
    panels, rows, said = [], [], list[Claim]()
    few, many = published.VALID_NEGATIVES
    for study in studies:
        (arm,) = _queue(study.setting)
        for record in study.finished(arm)[:1]:
            lines = []
            row = [study.setting.trunk]
            for colour, (name, key) in enumerate(SOURCES):
                x, y = record.curve(key)
                shown = [(s, v) for s, v in zip(x, y) if v > 0]
                lines.append({
                    "label": name, "x": [s for s, _ in shown], "y": [v for _, v in shown], "colour": colour, "marker": False,
                })  # fmt: skip
                late = y[len(y) * 3 // 4 :]
                row += [f"{np.mean(y):,.0f}" if y else "–", f"{np.mean(late):,.0f}" if late else "–"]
            panels.append(
                {"title": study.setting.trunk, "x": "iteration", "y": "valid negatives", "y_log": True, "lines": lines}
            )
            rows.append(row)
            said.append(
                Claim(
                    f"{study.setting.where}: {row[2]} valid negatives a step from the batch and {row[4]} from the memory in "
                    f"the last quarter (the paper, SOP with GoogLeNet: fewer than {few} and about {many:,})."
                )
            )
    if not rows:
        return []
    caption = "Negatives with a non-zero gradient per iteration, contrastive with a queue of the whole training set."
    header = ["valid negatives per iteration", "batch, mean", "batch, last quarter", "memory, mean", "memory, last quarter"]
    return [Figure(f"valid-negatives_{data}", {"panels": panels}, caption), Table(header, rows), *said]


# ------------------------------------------------------------------ how losses weigh


def _weighed(setting: Setting) -> list[Arm]:
    return [replace(arm, seeds=1) for arm in loss_arms(setting) if "outliers" in arm.measures]


def draw_outliers(data: str, studies: Sequence[Study]) -> list[Block]:
    """How the three losses would weigh the same negatives of one trained model's memory."""
    rows, panels, said = [], [], list[Claim]()
    middles = [round((a + b) / 2, 3) for a, b in pairwise(EDGES)]
    for study in studies:
        for arm in study.arms:
            told = _measured(study, arm, "outliers")
            if told is None:
                continue
            shares = {loss: found["hardest"] for loss, found in told.items() if found.get("anchors")}
            if arm.label.startswith("MS") and {"contrastive", "multi_similarity"} <= shares.keys():
                said.append(
                    Claim(
                        f"{study.setting.where}, {arm.label}: of an anchor's negatives' weight, multi-similarity gives the "
                        f"hardest one {percent(shares['multi_similarity'])} %, contrastive {percent(shares['contrastive'])} %."
                    )
                )
            lines = []
            for loss, found in told.items():
                if not found.get("anchors"):
                    continue
                rows.append([
                    f"{study.setting.trunk}, {arm.label}: weighed by {loss.replace('_', '-')}", f"{found['valid']:,.0f}",
                    f"{found['effective']:,.1f}", percent(found["hardest"]), percent(found["very_hard"]),
                    percent(found["very_hard_count"]),
                ])  # fmt: skip
                lines.append({"label": loss.replace("_", "-"), "x": middles, "y": found["bins"], "marker": False})
            panels.append({
                "title": f"{study.setting.trunk}, {arm.label}", "x": "similarity of the negative", "y": "share of the weight",
                "lines": lines,
            })  # fmt: skip
    if not rows:
        return []
    header = [
        "per anchor", "valid negatives", "negatives that count", "hardest one's share, %", "share above 0.8, %",
        "above 0.8 by count, %",
    ]  # fmt: skip
    caption = "Where the weight of the memory's negatives lies, by similarity; all losses look at the same pairs."
    told_text = (
        "The paper says that multi-similarity gains less from the memory because it weighs extremely hard negatives, possible "
        "outliers, heavily. “Negatives that count” is e to the entropy of the weights: with equal weights it is their number."
    )
    return [Figure(f"ms-outliers_{data}", {"panels": panels}, caption), Table(header, rows), told_text, *said]


# ------------------------------------------------------------------ pictures


def draw_mined(data: str, studies: Sequence[Study]) -> list[Block]:
    blocks: list[Block] = []
    for study in studies:
        (arm,) = _queue(study.setting)
        told = _measured(study, arm, "mined")
        if told is None:
            continue
        for kind, words in (
            ("uniform", "Negatives of the memory above 0.5, evenly from hard to simple"),
            ("hardest", "The ten hardest negatives, anchors whose hardest passes 0.8"),
        ):
            one_a_class = {found["positive"]: found for found in told[kind]}  # the anchors of a class share it
            rows = [_mined_row(found) for found in one_a_class.values()][:ROWS]
            caption = (
                f"{words}; {study.setting.label}. Yellow: the anchor. Green: a positive. Grey: the hardest negatives of its "
                "batch. Purple: those of the memory. Anchors drawn at random, one a class."
            )
            if rows:
                blocks.append(Pictures(f"mined-{kind}_{study.setting.slug}", data, rows, caption))
            else:
                blocks.append(f"{study.setting.trunk}, {kind}: no anchor of the batch had such negatives.")
    return blocks


def _mined_row(found: dict[str, Any]) -> list[Tile]:
    row = [Tile("train", found[kind], kind, kind) for kind in ("anchor", "positive")]
    row += [Tile("train", image, "batch", f"{s:.2f}") for image, s in found["batch"][:3]]
    return row + [Tile("train", image, "memory", f"{s:.2f}") for image, s in found["memory"]]


def _pair(setting: Setting) -> list[Arm]:
    return [replace(arm, seeds=1) for arm in contrastive(setting)]


def draw_retrieved(data: str, studies: Sequence[Study]) -> list[Block]:
    """The same queries without and with memory: where memory wins, where both fail."""
    blocks: list[Block] = []
    for study in studies:
        without, with_memory = (_measured(study, arm, "retrieved") for arm in study.arms)
        if without is None or with_memory is None or without["queries"] != with_memory["queries"]:
            continue
        first = [(a[0], b[0]) for a, b in zip(without["right"], with_memory["right"])]
        wins, fails = ([k for k, pair in enumerate(first) if pair == kind] for kind in ((0, 1), (0, 0)))
        lost, both = first.count((1, 0)), first.count((1, 1))
        blocks.append(
            f"{study.setting.label}: of {len(first)} queries drawn at random, the nearest image is right in both runs for "
            f"{both}, only with memory for {len(wins)}, only without for {lost}, in neither for {len(fails)}."
        )
        for kind, which, words in (("wins", wins, "right with memory and wrong without"), ("fails", fails, "wrong in both")):
            sides = (("without", without), ("with", with_memory))
            rows = [row for k in which[:ROWS] for row in (*(_found_row(told, k, name) for name, told in sides), [])][:-1]
            caption = (
                f"Top 5 without memory (first row of each pair) and with it (second), queries whose nearest image is {words}; "
                f"{study.setting.label}. Green: of the query's class. Purple: of another. The first such queries of the draw."
            )
            if rows:
                blocks.append(Pictures(f"retrieved-{kind}_{study.setting.slug}", data, rows, caption))
    return blocks


def _measured(study: Study, arm: Arm, name: str) -> Any:
    """What was measured on the first of an arm's runs that has it, or None."""
    return next((run.measures[name] for run in study.runs(arm) if run.measures.get(name)), None)


def _found_row(told: dict[str, Any], k: int, name: str) -> list[Tile]:
    near = zip(told["neighbours"][k], told["right"][k], told["similarities"][k])
    query = Tile("query", told["queries"][k], "anchor", name)
    marked = [("right", f"{s:.2f} right") if ok else ("wrong", f"{s:.2f}") for _, ok, s in near]  # not by colour alone
    return [query, *(Tile("gallery", image, *mark) for image, mark in zip(told["neighbours"][k], marked))]


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
