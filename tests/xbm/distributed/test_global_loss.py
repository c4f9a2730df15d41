"""Losses, gradients and banks of 1 to 4 processes, held against those of a single one on the same global batches."""

import pytest
import torch

from tests.known import NAMES
from tests.worlds import Played, Scene, joined, on_ranks, play_all, play_embeddings, play_net, scenes
from xbm import ContrastiveLoss, CrossBatchMemory, InputError
from xbm.distributed import GlobalLoss, ReplicatedMemory, ShardedMemory


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
