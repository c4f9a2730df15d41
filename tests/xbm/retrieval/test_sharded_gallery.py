"""A gallery sharded over the ranks gives the scores and neighbours of one process: ties, copies, empty ranks, bad input."""

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.worlds import on_ranks
from tests.xbm.retrieval.retrieval_plain import Protocol
from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.retrieval import cumulative, evaluate, evaluate_one_per_class, nearest, ranking, score, similarity
from xbm.retrieval.similarity import read_sets, read_shard


class Case(NamedTuple):
    rows: str  # "tied" or "copied"
    sizes: tuple[int, ...]  # of the ranks' parts of the queries
    gallery: tuple[int, ...] | None = None
    ids: int = 0  # how many different ones; 0: none are given
    classes: int = 7
    sort_above: int = ranking.SORT_ABOVE
    work: int = similarity.WORK_BYTES


CASES = [
    Case("tied", (70, 0, 61)),
    Case("tied", (5, 150, 66), classes=40, work=60_000),
    Case("tied", (40, 40, 40), sort_above=3),
    Case("tied", (64, 65, 63), sort_above=0, work=60_000),
    Case("copied", (0, 0, 50)),
    Case("copied", (31, 80, 22), ids=30),
    Case("copied", (33, 1, 40), gallery=(64, 0, 70)),
    Case("tied", (0, 20, 9), gallery=(1, 129, 64), sort_above=2),
    Case("copied", (30, 30, 30), gallery=(50, 20, 80), ids=60, work=60_000),
    Case("equal", (90, 3, 70), classes=3),
]


def arguments(case: Case) -> dict[str, Any]:
    """The arguments of `evaluate`, of all rows."""
    draw = torch.Generator().manual_seed(sum(case.sizes) + case.classes)
    arrays: dict[str, Any] = {}
    for name, sizes in (("embeddings", case.sizes), ("gallery", case.gallery)):
        if sizes is None:
            continue
        n = sum(sizes)
        if case.rows == "tied":  # 1 or 4 entries of ±1: cosines are exact, and many pairs are equal
            some = torch.rand(n, 6, generator=draw).argsort(1) < torch.tensor([1, 4])[torch.arange(n) % 2, None]
            rows = some * (torch.randint(0, 2, (n, 6), generator=draw) * 2.0 - 1)
        elif case.rows == "equal":
            rows = torch.randn(1, 37, generator=draw).expand(n, -1).clone()
        else:
            rows = torch.randn(n, 37, generator=draw)
            rows[torch.randperm(n, generator=draw)[: n // 3]] = rows[torch.randint(0, n, (n // 3,), generator=draw)]
        labels = torch.randint(0, case.classes, (n,), generator=draw)
        labels[:4] = 0
        prefix = "" if name == "embeddings" else "gallery_"
        arrays |= {name: rows, f"{prefix}labels": labels}
        if case.ids:
            arrays[f"{prefix}ids"] = torch.randint(0, case.ids, (n,), generator=draw)
    return arrays


def own(rows: Tensor, sizes: tuple[int, ...], rank: int) -> Tensor:
    return rows.split(sizes)[rank]


def results(case: Case, world: Ranks | None) -> dict[str, Any]:
    ranking.SORT_ABOVE, similarity.WORK_BYTES = case.sort_above, case.work
    whole = arguments(case)
    local = dict(whole)
    if world is not None:
        local["embeddings"] = own(whole["embeddings"], case.sizes, world.rank)
        if case.gallery is not None:
            local["gallery"] = own(whole["gallery"], case.gallery, world.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome: dict[str, Any] = {
            "scores": evaluate(**local, ks=(1, 2, 5, 64), ranks=world),
            "curve": cumulative(**local, up_to=70, ranks=world),
            "one per class": evaluate_one_per_class(local["embeddings"], whole["labels"], repeats=2, ranks=world),
        }
    ids = whole.get("ids", torch.arange(len(whole["labels"])) if case.gallery is None else None)
    searched = local.get("gallery", local["embeddings"])
    outcome["nearest"] = nearest(local["embeddings"], searched, 70, ids, whole.get("gallery_ids", ids), world)
    ranking.SORT_ABOVE, similarity.WORK_BYTES = Case._field_defaults["sort_above"], Case._field_defaults["work"]
    return outcome


def on_a_rank(cases: list[Case]) -> list[dict[str, Any]]:
    world = Ranks()
    return [results(case, world) for case in cases] + [refused(world) | {"sent": sent(world)}]


def sent(world: Ranks) -> int:
    """Bytes of the queries and of what is found, for 48 queries of 5 numbers with 2 relevant items each."""
    before = world.sent.copy()
    evaluate(own(torch.eye(48, 5) + 1, (16, 10, 22), world.rank), torch.arange(48) // 3, ks=(1,), ranks=world)
    spent = world.sent - before
    return sum(spent[why] for why in ("queries", "similarities of relevant items", "ranks of relevant items"))


def refused(world: Ranks) -> dict[str, Any]:
    """What is wrong on one rank is an error on all of them."""
    bad, messages = torch.eye(3) * (torch.nan if world.rank == 1 else 1), []
    for call in (
        lambda: read_shard(world, "embeddings", bad),
        lambda: read_shard(world, "embeddings", torch.eye(3)[:, : 2 + (world.rank == 2)]),
        lambda: read_shard(world, "embeddings", torch.zeros(0, 3)),
        lambda: read_sets(world, torch.eye(3), torch.zeros(3, dtype=torch.int64)),
        lambda: read_sets(world, torch.eye(3), torch.zeros(9, dtype=torch.int64), torch.eye(2), torch.zeros(6)),
        lambda: score(Protocol("test", range(8), (1,)), torch.eye(3), ranks=world),
    ):
        with pytest.raises(InputError) as error:
            call()
        messages.append(str(error.value))
    return {"refused": messages}


def test_scores_and_neighbours_are_those_of_one_process():
    everyone = on_ranks(3, on_a_rank, CASES)
    assert len({tuple(each[-1]["refused"]) for each in everyone}) == 1
    messages = everyone[0][-1]["refused"]
    assert [each[-1]["sent"] for each in everyone] == [48 * (8 * 5 + 24 * 2 + 8) * 2 // 3] * 3, "as docs/scale.md has it"
    for message, words in zip(
        messages, ("NaN", "one dimension", "(0, 3)", "3 labels for 9 rows", "same model", "8 query"), strict=True
    ):
        assert words in message
    for number, case in enumerate(CASES):
        alone = results(case, None)
        for rank in range(3):
            ours = everyone[rank][number]
            assert ours["scores"] == alone["scores"], case
            assert torch.equal(ours["curve"], alone["curve"]), case
            assert ours["one per class"] == pytest.approx(alone["one per class"], nan_ok=True, abs=0, rel=0), case
            assert torch.equal(ours["nearest"][1], alone["nearest"][1]), case
            torch.testing.assert_close(ours["nearest"][0], alone["nearest"][0], rtol=0, atol=3e-7)
