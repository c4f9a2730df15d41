"""Losses, gradients and banks of 1 to 4 processes, held against those of a single one on the same global batches."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.known import NAMES
from tests.worlds import MEMORIES, Played, Scene, joined, on_ranks, play_all, play_embeddings, play_net, scenes
from xbm import ContrastiveLoss, CrossBatchMemory, InputError, SupConLoss
from xbm.distributed import GlobalLoss, Ranks, ReplicatedMemory, ShardedMemory


def hold_against_one(all_scenes: list[Scene], world: int) -> None:
    many = on_ranks(world, play_all, play_embeddings, all_scenes, world)
    for number, scene in enumerate(all_scenes):
        alone, ranks = play_embeddings(scene, 0), [played[number] for played in many]
        for each in ranks:
            torch.testing.assert_close(each.losses, alone.losses, rtol=1e-6, atol=1e-6, msg=lambda m, s=scene: f"{s}: {m}")
            assert torch.equal(each.losses, ranks[0].losses), scene
        for mine, theirs in zip(joined([r.gradients for r in ranks]), alone.gradients):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, msg=lambda m, s=scene: f"{s}: {m}")
        for mine, theirs in zip(joined([r.negatives for r in ranks]), alone.negatives):
            assert torch.equal(mine, theirs), scene
        same_banks(scene, alone, ranks)


def same_banks(scene: Scene, alone: Played, ranks: list[Played]) -> None:
    states = [r.state for r in ranks] if scene.mode == "replicated" else [ranks[0].state]
    for state in states:
        assert state.keys() == alone.state.keys()
        for name, value in alone.state.items():
            if name == "rows" and scene.update == "backprop":
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
                assert torch.equal(state[name], states[0][name]), (scene, "differs between ranks")
            else:
                assert torch.equal(state[name], value), (scene, name)


def test_three_ranks_with_uneven_batches_are_one_process():
    hold_against_one(scenes(uneven=True, steps=5), 3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("uneven", [False, True])
def test_any_number_of_ranks_is_one_process(world, uneven):
    hold_against_one(scenes(uneven=uneven), world)


def test_every_loss_may_be_sharded_and_either_copy_left_out():
    kinds = [("copy", "sum"), ("instance", "mean")]
    exact: dict = {"steps": 5, "dtype": torch.float64}  # circle's logits, of a scale of 256, tell fp32 sums apart
    some = [Scene("queue", "sharded", name, True, *kind, **exact) for name in NAMES for kind in kinds]
    some += [Scene("queue", "sharded", name, True, "copy", "balanced", **exact) for name in ("contrastive", "margin")]
    keyed = [("queue", "replicated"), ("backprop", "replicated"), ("backprop", "sharded")]
    some += [Scene(*kind, "triplet", True, "copy", **exact) for kind in keyed]
    hold_against_one(some, 2)


def hold_net_against_one(all_scenes: list[Scene], world: int) -> None:
    many = on_ranks(world, play_all, play_net, all_scenes, world)
    for number, scene in enumerate(all_scenes):
        alone = play_net(scene, 0)
        for played in many:
            each = played[number]
            torch.testing.assert_close(each.losses, alone.losses, rtol=1e-5, atol=1e-5, msg=lambda m, s=scene: f"{s}: {m}")
            for name, value in alone.weights.items():
                torch.testing.assert_close(each.weights[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, s=scene: f"{s}: {m}")
                assert torch.equal(each.weights[name], many[0][number].weights[name]), (scene, "differs between ranks")


def test_a_net_on_two_ranks_with_uneven_batches_is_the_net_of_one_process():
    hold_net_against_one(scenes(uneven=True, steps=4)[::5], 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_net_trained_on_several_ranks_is_the_net_of_one_process(world, uneven):
    hold_net_against_one(scenes(uneven=uneven), world)


# ------------------------------------------------------------------ without a group


@pytest.mark.parametrize("kind", [ReplicatedMemory, ShardedMemory])
def test_what_does_not_fit_several_processes_is_refused(kind):
    memory, loss_fn = kind(size=4, dim=2), GlobalLoss(ContrastiveLoss())
    v, labels = torch.eye(2), torch.tensor([0, 1])
    with pytest.raises(InputError, match="pass ids"):
        memory.enqueue(v, labels)
    with pytest.raises(InputError, match="pass ids"):
        loss_fn(v, labels, memory)
    with pytest.raises(InputError, match="ReplicatedMemory or ShardedMemory"):
        loss_fn(v, labels, CrossBatchMemory(4, 2), ids=labels)
    with pytest.raises(InputError, match="pair loss of xbm"):
        GlobalLoss(torch.nn.MSELoss())


# ------------------------------------------------------------------ references, and a learned temperature


def play_pairs(world: int, mode: str, exclude: str | None, update: str) -> dict:
    """Given anchors and references with unequal splits, against a memory; gradients as a single process would have them."""
    loss_fn: Any = SupConLoss(0.3, learn_temperature=True).double()
    log_temperature = loss_fn.log_temperature
    memory: Any = CrossBatchMemory(23, 5, update, dtype=torch.float64, alpha=0.5)
    rank = dist.get_rank() if world else 0
    if world:
        ranks = Ranks()
        loss_fn = GlobalLoss(loss_fn, ranks)
        memory = None
        if mode != "batch":
            memory = MEMORIES[mode](23, 5, update, dtype=torch.float64, alpha=0.5, ranks=ranks)
    elif mode == "batch":
        memory = None
    results: dict[str, Any] = {"loss": [], "anchors": [], "references": [], "negatives": [], "temperature": []}
    for k, (a, b) in enumerate([([4, 3, 2], [2, 2, 2]), ([0, 9, 0], [1, 0, 5]), ([3, 3, 3], [6, 0, 0])]):
        draw = torch.Generator().manual_seed(k)
        v, d = (F.normalize(torch.randn(n, 5, dtype=torch.float64, generator=draw)) for n in (9, 6))
        ids, d_ids = torch.randperm(12, generator=draw)[:9], torch.randperm(12, generator=draw)[:6]
        if world:
            a, b = ([*x[: world - 1], sum(x[world - 1 :])] for x in (a, b))
            v, ids = (x.split(a)[rank] for x in (v, ids))
            d, d_ids = (x.split(b)[rank] for x in (d, d_ids))
        labels, d_labels = ids % 4, d_ids % 4
        v, d = v.clone().requires_grad_(), d.clone().requires_grad_()
        log_temperature.grad = None
        loss, stats = loss_fn(
            v, labels, memory, ids=ids, references=d, reference_labels=d_labels, reference_ids=d_ids, exclude=exclude,
            return_stats=True,
        )  # fmt: skip
        loss.backward()
        if memory is not None:
            memory.step()
            memory.enqueue(d.detach(), d_labels, d_ids)
        results["loss"].append(loss.item())
        results["anchors"].append(v.grad / max(1, world))
        results["references"].append(d.grad / max(1, world))
        results["negatives"].append(stats.valid_negatives)
        results["temperature"].append(log_temperature.grad.item())
    results["rows"] = None if memory is None else memory.state_dict().get("rows")
    return results


PAIRS = [
    ("batch", None, "queue"), ("batch", "instance", "queue"), ("replicated", None, "queue"), ("replicated", "copy", "queue"),
    ("replicated", None, "backprop"), ("sharded", None, "queue"), ("sharded", "copy", "queue"),
    ("sharded", "instance", "queue"),
    ("sharded", "instance", "moving_average"), ("sharded", "copy", "backprop"), ("sharded", None, "backprop"),
]  # fmt: skip


def play_all_pairs(world: int) -> list[dict]:
    return [play_pairs(world, *case) for case in PAIRS]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_references_of_all_ranks_are_those_of_one_process(world):
    ranks = on_ranks(world, play_all_pairs, world)
    for number, case in enumerate(PAIRS):
        alone, several = play_pairs(0, *case), [rank[number] for rank in ranks]
        for each in several:
            assert each["loss"] == pytest.approx(alone["loss"], rel=1e-10), case
            assert each["temperature"] == pytest.approx(alone["temperature"], rel=1e-9), case
        for name in ("anchors", "references", "negatives"):
            for mine, theirs in zip(joined([each[name] for each in several]), alone[name]):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}")
        if alone["rows"] is not None:
            torch.testing.assert_close(several[0]["rows"], alone["rows"], rtol=1e-9, atol=1e-12)
