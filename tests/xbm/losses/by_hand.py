"""A small case in plain Python numbers, and a loss held against its formula written out with `math`."""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

from xbm import CrossBatchMemory
from xbm.engine import streaming
from xbm.losses import PairLoss

Value = Callable[[Sequence[float], Sequence[float]], float]  # an anchor's loss from the similarities of P and N
Weights = Callable[[Sequence[float], Sequence[float]], tuple[list[float], list[float]]]  # w of each of P and of N
# the engines, and the ways in which the streaming one may go about it
ENGINES: list[tuple[str, dict[str, int]]] = [
    ("reference", {}),
    ("streaming", {}),  # so few pairs: all at once
    ("streaming", {"SMALL": -1}),  # positives listed
    ("streaming", {"SMALL": -1, "MOST_LISTED": -1, "TILE": 3 * 4}),  # positives by mask, four rows at a time
]


class Case(NamedTuple):
    """Five anchors and thirteen rows in three dimensions. Anchor 3 has no positives, anchor 4 no negatives."""

    anchors: list[list[float]]
    labels: list[int]
    ids: list[int]
    rows: list[list[float]]
    row_labels: list[int]
    row_ids: list[int]


def unit(x: Sequence[float]) -> list[float]:
    length = math.sqrt(math.fsum(a * a for a in x))
    return [a / length for a in x]


def case(seed: int, spread: float = 0.7) -> Case:
    draw = random.Random(seed).gauss
    centre = {label: [draw(0, 1) for _ in range(3)] for label in (0, 1, 2, 7)}

    def near(label: int) -> list[float]:
        return unit([a + spread * draw(0, 1) for a in centre[label]])

    labels, row_labels = [0, 1, 2, 7, 0], [0, 1, 2, 0, 1, 2, 0, 1, 1, 0, 2, 0, 1]
    # whatever is not of its class carries anchor 4's id; row 3 is an older copy of anchor 0
    row_ids = [99 if label else 10 + j for j, label in enumerate(row_labels)]
    row_ids[3] = 50
    ids = [50, 51, 52, 53, 99]
    return Case([near(label) for label in labels], labels, ids, [near(label) for label in row_labels], row_labels, row_ids)


def similarities(c: Case) -> list[list[float]]:
    return [[math.fsum(a * b for a, b in zip(v, row)) for row in c.rows] for v in c.anchors]


def pairs(c: Case, i: int) -> tuple[list[int], list[int]]:
    """The rows that are anchor i's positives, and those that are its negatives."""
    others = [j for j in range(len(c.rows)) if c.row_ids[j] != c.ids[i]]
    P = [j for j in others if c.row_labels[j] == c.labels[i]]
    N = [j for j in others if c.row_labels[j] != c.labels[i]]
    return P, N


def assert_formula(make: Callable[..., PairLoss], value: Value, weights: Weights, c: Case, steepness: bool = True) -> None:
    """The loss `make(engine=...)` has this value, this gradient and these GPW weights on the case, with each engine.

    `steepness` also holds the weights against the slope of `value` itself (not for weights that treat a part as constant).
    """
    S, m = similarities(c), len(c.anchors)
    by_anchor = [pairs(c, i) for i in range(m)]
    total, expected_w = 0.0, [[0.0] * len(c.rows) for _ in range(m)]
    for i, (P, N) in enumerate(by_anchor):
        sP, sN = [S[i][k] for k in P], [S[i][j] for j in N]
        total += value(sP, sN)
        wP, wN = weights(sP, sN)
        for j, w in [*zip(P, wP), *zip(N, wN)]:
            expected_w[i][j] = w
        if steepness:
            assert wP == pytest.approx([-slope(lambda s, sN=sN: value(s, sN), sP, k) for k in range(len(P))], abs=1e-5)
            assert wN == pytest.approx([slope(lambda s, sP=sP: value(sP, s), sN, j) for j in range(len(N))], abs=1e-5)
    sign = [[-1.0 if c.row_labels[j] == c.labels[i] else 1.0 for j in range(len(c.rows))] for i in range(m)]
    gradient = [
        [math.fsum(sign[i][j] * expected_w[i][j] * c.rows[j][d] for j in range(len(c.rows))) / m for d in range(3)]
        for i in range(m)
    ]

    memory = CrossBatchMemory(len(c.rows), 3, dtype=torch.float64)
    memory.enqueue(torch.tensor(c.rows, dtype=torch.float64), torch.tensor(c.row_labels), torch.tensor(c.row_ids))
    for engine, settings in ENGINES:
        v = torch.tensor(c.anchors, dtype=torch.float64, requires_grad=True)
        with pytest.MonkeyPatch.context() as patch:
            for name, setting in settings.items():
                patch.setattr(streaming, name, setting)
            loss = make(engine=engine)(v, torch.tensor(c.labels), memory, ids=torch.tensor(c.ids))
        loss.backward()
        assert loss.item() == pytest.approx(total / m, rel=1e-11, abs=1e-12)
        for got, row in zip(v.grad.tolist(), gradient):
            assert got == pytest.approx(row, rel=1e-9, abs=1e-11)

    positive, negative = torch.zeros(m, len(c.rows), dtype=torch.bool), torch.zeros(m, len(c.rows), dtype=torch.bool)
    for i, (P, N) in enumerate(by_anchor):
        positive[i, P], negative[i, N] = True, True
    w = make().weights(torch.tensor(S, dtype=torch.float64), positive, negative)
    for got, row in zip(w.tolist(), expected_w):
        assert got == pytest.approx(row, rel=1e-9, abs=1e-11)


def slope(f: Callable[[list[float]], float], x: list[float], at: int, h: float = 1e-6) -> float:
    up, down = list(x), list(x)
    up[at] += h
    down[at] -= h
    return (f(up) - f(down)) / (2 * h)


def one_anchor(loss_fn: PairLoss, P: Sequence[float], N: Sequence[float]) -> tuple[float, list[float], list[float]]:
    """Value and weights of a single anchor with these similarities, from both statements of the loss's mathematics."""
    S = torch.tensor([[*P, *N]], dtype=torch.float64, requires_grad=True)
    positive = torch.tensor([[True] * len(P) + [False] * len(N)], dtype=torch.bool)
    value = loss_fn.dense(S, positive, ~positive).sum()
    value.backward()
    w = loss_fn.weights(S.detach(), positive, ~positive)[0].tolist()
    by_autograd = torch.where(positive, -S.grad, S.grad)[0].tolist()
    assert w == pytest.approx(by_autograd, rel=1e-9, abs=1e-12)
    return value.item(), w[: len(P)], w[len(P) :]
