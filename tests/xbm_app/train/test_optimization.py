"""Optimizers, schedules, clipping and averaged weights, as they are computed by hand."""

import math
from itertools import islice

import pytest
import torch
from torch import nn

from tests.tiny import same, tiny_config
from xbm.errors import InputError
from xbm_app.files import read_checkpoint
from xbm_app.train import loop
from xbm_app.train.config import Config, Optim, check, override
from xbm_app.train.dataset import begin_run
from xbm_app.train.load import evaluate_run, load
from xbm_app.train.loop import learn, train
from xbm_app.train.optimization import AveragedWeights, changes_rate, rate_factor
from xbm_app.train.state import RunState


@pytest.fixture
def build(photos, tmp_path):
    def make(name: str = "run", **changes) -> RunState:
        config = tiny_config(photos, **changes)
        return RunState(config, begin_run(config, tmp_path / name), tmp_path / name)

    return make


def rates(steps: range, **settings) -> list[float]:
    return [rate_factor(Optim(**settings), step) for step in steps]


def test_schedules_by_hand():
    assert rates(range(6), schedule="step", decay_at=(2, 4)) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert rates(range(5), schedule="linear", iterations=5) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    half = [0.5 + 0.5 * math.cos(math.pi * k / 4) for k in range(4)]
    assert rates(range(7), schedule="cosine", iterations=7, warmup=3) == pytest.approx([1 / 3, 2 / 3, 1, *half])
    assert rates(range(4), schedule="step", decay_at=(3,), warmup=2) == pytest.approx([0.5, 1, 1, 0.1])


@pytest.mark.parametrize("optim", [Optim(decay_at=(3, 5), warmup=2), Optim(schedule="cosine", iterations=9, warmup=2)])
def test_the_rate_is_set_wherever_it_changes(optim):
    for step in range(1, 9):
        if rate_factor(optim, step) != rate_factor(optim, step - 1):
            assert changes_rate(optim, step), step
    assert not changes_rate(Optim(decay_at=(3,)), 4)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_norms_and_biases_are_spared_from_decay_except_with_the_papers_adam(build, name):
    run = build(optim__name=name, optim__weight_decay=0.3)
    decayed = {id(p): group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"]}
    assert len(decayed) == len(list(run.model.parameters()))
    assert {decayed[id(p)] for p in run.model.parameters() if p.dim() < 2} == {0.0}
    assert {decayed[id(p)] for p in run.model.parameters() if p.dim() >= 2} == {0.3}
    assert type(run.optimizer).__name__.lower() == name and run.optimizer.param_groups[-1]["name"] == "head"
    plain = build("plain", optim__weight_decay=0.3)
    assert [group["name"] for group in plain.optimizer.param_groups] == ["trunk", "head"]


def test_layers_learn_slower_the_nearer_they_are_to_the_input(build):
    run = build(optim__name="adamw", optim__layer_decay=0.5, model__trunk_lr=0.1, optim__lr=1.0, model__trunk="timm/test_vit",
                data__resize=32, data__crop=32)  # fmt: skip
    rate = {id(p): group["lr"] for group in run.optimizer.param_groups for p in group["params"]}
    of = {name: rate[id(p)] for name, p in run.model.named_parameters()}
    blocks = len(run.model.trunk.blocks)
    assert of["head.weight"] == of["head.bias"] == 1.0
    assert of["trunk.norm.weight"] == pytest.approx(0.1)
    for k in range(blocks):
        assert of[f"trunk.blocks.{k}.attn.qkv.weight"] == pytest.approx(0.1 * 0.5 ** (blocks - 1 - k))
    assert of["trunk.pos_embed"] == of["trunk.patch_embed.proj.bias"] == pytest.approx(0.1 * 0.5**blocks)


def gradients_after(run: RunState) -> list[torch.Tensor]:
    """The gradients with which the optimizer is called in a first step."""
    seen: list[torch.Tensor] = []
    hook = run.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.extend(p.grad.clone() for g in optimizer.param_groups for p in g["params"])
    )
    learn(run, 0, [batch[1:] for batch in islice(run.data.batches(0), run.data.batches_per_step)], False)
    hook.remove()
    return seen


def test_gradients_are_scaled_to_the_largest_norm(build):
    free, clipped = gradients_after(build("free")), gradients_after(build("clipped", optim__clip=0.01))
    norm = torch.cat([g.flatten() for g in free]).norm()
    assert norm > 0.01
    for a, b in zip(free, clipped, strict=True):
        torch.testing.assert_close(b, a * 0.01 / norm)
    loose = gradients_after(build("loose", optim__clip=1e6))
    assert same(free, loose) == []


def test_a_batch_in_chunks_has_the_gradients_of_the_whole_batch(build):
    whole = gradients_after(build("whole", model__freeze_batch_norm=True, batch__accumulate=2))
    chunked = gradients_after(build("chunked", model__freeze_batch_norm=True, batch__accumulate=2, batch__chunk=3))
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_average_by_hand():
    model = nn.BatchNorm1d(3)
    average = AveragedWeights(model, decay=0.5)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for t in range(1, 12):
        with torch.no_grad():
            model.weight += torch.randn(3)
        model.running_mean += 1
        average.update()
        decay = min(0.5, (1 + t) / (10 + t))
        for name in ("weight", "running_mean"):
            expected[name] = decay * expected[name] + (1 - decay) * model.state_dict()[name]
    torch.testing.assert_close(average.values["weight"], expected["weight"])
    torch.testing.assert_close(average.values["running_mean"], expected["running_mean"])
    assert torch.equal(average.values["bias"], model.bias) and "num_batches_tracked" not in average.values
    trained = model.weight.clone()
    with average.in_model():
        torch.testing.assert_close(model.weight, expected["weight"])
    assert torch.equal(model.weight, trained)


def test_the_average_is_what_is_scored_saved_and_loaded(photos, tmp_path):
    config = tiny_config(photos, optim__ema=0.8, optim__lr=0.03)
    result = train(config, tmp_path / "run", quiet=True)
    state = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")
    trained = state["average"]["trained"]
    assert state["model"].keys() == trained.keys()
    assert not torch.equal(state["model"]["head.weight"], trained["head.weight"])
    assert same(load(tmp_path / "run").model.state_dict(), state["model"]) == []
    assert evaluate_run(tmp_path / "run")["protocols"] == result["protocols"]
    train(override(config, {"optim.ema": 0.0}), tmp_path / "plain", quiet=True)
    plain = read_checkpoint(tmp_path / "plain" / "checkpoints" / "last.pt")
    assert "average" not in plain and same(plain["model"], trained) == []  # training does not see it


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim.warmup": 5, "optim.schedule": "plateau"}, "optim.warmup needs a schedule that is known beforehand"),
        ({"optim.layer_decay": 0}, r"optim\.layer_decay must be above 0 and at most 1"),
        ({"optim.ema": 1}, "optim.ema less than 1"),
        ({"optim.clip": -1}, r"optim\.clip must be at least 0, got -1\.0"),
    ],
)
def test_settings_that_no_run_can_use_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        check(override(Config(), settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim__name": "adan"}, "unknown optim.name 'adan': did you mean 'adam'"),
        ({"batch__chunk": 4}, r"normalize each chunk by itself: set model\.freeze_batch_norm=true"),
        ({"model__checkpointing": True}, r"twice in batch norm: set model\.freeze_batch_norm=true"),
        ({"model__checkpointing": True, "model__freeze_batch_norm": True}, "small cannot recompute activations"),
        ({"model__freeze": "blocks:9"}, r"up to blocks:3 can be frozen: choose fewer, or set model\.freeze=trunk"),
        ({"model__freeze": "blocks"}, r"model\.freeze must be none, trunk, or blocks:N such as blocks:2, got blocks"),
    ],
)
def test_a_run_that_cannot_be_is_refused(build, changes, message):
    with pytest.raises(InputError, match=message):
        build(**changes)


def test_a_schedule_that_ends_with_the_run_is_not_made_longer(photos, tmp_path):
    config = tiny_config(photos, optim__schedule="cosine", optim__iterations=4)
    train(config, tmp_path, quiet=True)
    with pytest.raises(InputError, match=r"optim\.iterations was 4 in this run and is 9 now"):
        train(override(config, {"optim.iterations": 9}), tmp_path, resume=True, quiet=True)


def test_recomputing_activations_changes_no_gradient(build):
    vit = {"model__trunk": "timm/test_vit", "data__resize": 32, "data__crop": 32}
    plain, recomputed = gradients_after(build("plain", **vit)), gradients_after(build("less", model__checkpointing=True, **vit))
    assert same(plain, recomputed) == []


def test_a_compiled_trunk_is_used_in_training_only(build, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda net: lambda images: calls.append(len(images)) or net(images))
    run = build(model__compile=True)
    gradients_after(run)
    assert calls == [8]
    run.model.eval()
    run.model(run.drift.images)
    assert calls == [8] and not [name for name in run.model.state_dict() if "compiled" in name]
    assert loop.Replayed is not None
