import math
from itertools import islice

import numpy as np
import pytest
import torch

from tests.same import same
from tests.tiny import tiny_config
from xbm.errors import InputError
from xbm_app.files import read_checkpoint
from xbm_app.train import loop, state
from xbm_app.train.config import Config, override
from xbm_app.train.dataset import begin_run
from xbm_app.train.label_errors import IGNORED
from xbm_app.train.loop import fill_memory, learn, row_of_metrics
from xbm_app.train.metrics import watcher_of
from xbm_app.train.state import SUMS, RunState


@pytest.fixture
def build(photos, tmp_path):
    def make(name: str = "run", **changes) -> RunState:
        config = tiny_config(photos, **changes)
        return RunState(config, begin_run(config, tmp_path / name), tmp_path / name)

    return make


class Progress:
    """A console that records what it is asked to track."""

    def __init__(self) -> None:
        self.events = []

    def track(self, items, description, total):
        try:
            self.events.append(total)
            yield from items
        finally:  # a bar must be closed even if the memory is full before all images have come
            self.events.append("closed")


@pytest.mark.parametrize(
    ("changes", "filled"),
    [
        ({}, 36),
        ({"memory__ratio": 0.7}, 25),
        ({"memory__update": "moving_average"}, 36),
        ({"memory__update": "backprop", "batch__size": 10}, 36),
        ({"memory__update": "moving_average", "optim__iterations": 3}, 24),  # no more than the run trains on
    ],
)
def test_the_memory_is_filled_without_a_trace_in_the_model(build, changes, filled):
    run = build(**changes)
    statistics = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    progress, size = Progress(), run.config.batch.size
    fill_memory(run, progress)
    assert len(run.memory) == filled
    assert progress.events == [math.ceil(min(36, size * run.config.optim.iterations) / size), "closed"]
    assert torch.equal(run.memory.labels, torch.from_numpy(run.dataset.train.labels)[run.memory.ids])
    assert same(statistics, dict(run.model.named_buffers())) == []


def test_extra_batches_fill_the_memory_and_leave_no_trace_in_the_model(build, monkeypatch):
    run = build(memory__updates_per_step=3)
    batches = [batch[1:] for batch in islice(run.data.batches(0), 3)]
    monkeypatch.setattr(loop, "update_weights", lambda run: None)
    learn(run, 0, batches, True)
    assert run.memory.ids.tolist() == [each for _, _, ids in batches for each in ids.tolist()]
    once = build("once")
    once.model.train()
    once.model(batches[-1][0])  # only the anchors leave a trace in the batch-norm statistics
    assert same(dict(once.model.state_dict()), dict(run.model.state_dict())) == []
    assert not run.memory.rows.requires_grad


def test_the_trunk_learns_at_its_share_and_both_decay(build):
    run = build(model__trunk_lr=0.1, optim__lr=1e-2, optim__decay_at=(5, 9), optim__weight_decay=0.25)
    rates = {}
    for step in (0, 4, 5, 8, 9, 16):
        run.set_learning_rate(step)
        assert rate_of(run) == pytest.approx([1e-2, 1e-3, 1e-4][(step >= 5) + (step >= 9)])
        rates[step] = {group["name"]: group["lr"] for group in run.optimizer.param_groups}
    assert rates[4] == pytest.approx({"trunk": 1e-3, "head": 1e-2})
    assert rates[16] == pytest.approx({"trunk": 1e-5, "head": 1e-4})
    assert {group["weight_decay"] for group in run.optimizer.param_groups} == {0.25}
    assert isinstance(run.optimizer, torch.optim.Adam)
    counted = sum(len(group["params"]) for group in run.optimizer.param_groups)
    assert counted == len(list(run.model.parameters()))


def test_the_proxies_of_a_loss_learn_at_their_multiple_of_the_rate(build):
    proxies = {"loss__name": "pml/ProxyAnchorLoss", "memory__ratio": 0.0, "optim__lr": 1e-2, "optim__decay_at": (5,)}
    run = build(loss__lr_factor=7.0, model__trunk_lr=0.1, **proxies)
    for step, factor in ((0, 1), (5, 0.1)):
        run.set_learning_rate(step)
        rates = {group["name"]: group["lr"] for group in run.optimizer.param_groups}
        assert rates == pytest.approx({"loss": 7e-2 * factor, "trunk": 1e-3 * factor, "head": 1e-2 * factor})
    assert [group["params"] for group in run.optimizer.param_groups if group["name"] == "loss"] == [[*run.loss_fn.parameters()]]
    assert row_of_metrics(run, 5, torch.eye(4), {})["lr"] == pytest.approx(1e-3)
    still = build("still", loss__lr_factor=0.0, **proxies)
    before = [p.clone() for p in still.loss_fn.parameters()]
    learn(still, 0, [next(still.data.batches(0))[1:]], False)
    assert all(torch.equal(a, b) for a, b in zip(before, still.loss_fn.parameters(), strict=True))


def rate_of(run: RunState) -> float:
    return run.optimizer.param_groups[-1]["lr"]


def test_a_plateau_follows_the_constants_of_the_released_code(build):
    """Mode max, threshold 0.001 (relative), patience 4, cooldown 2, floor lr / 20."""
    run = build(optim__schedule="plateau", data__holdout=0.4, log__evaluate_every=3)
    rates = []
    for recall in [0.5, 0.6, *[0.6005] * 5, *[0.6] * 7, *[0.6] * 14]:  # 0.6005 is no gain: the threshold is 0.0006
        run.plateau.step(recall)
        run.set_learning_rate(3)
        rates.append(rate_of(run))
    assert rates[:6] == [1e-3] * 6 and rates[6:13] == pytest.approx([1e-4] * 7)  # the fifth without a gain; 2 + 5 to the next
    assert rates[13:] == pytest.approx([5e-5] * 15)  # the floor


def test_full_precision_rounds_no_convolution(build):
    for precision, rounded in (("fp32", False), ("auto", True)):
        build(precision, optim__precision=precision)
        assert torch.backends.cudnn.allow_tf32 is rounded


def test_the_head_of_the_released_code_is_larger_and_has_no_bias_at_first(build):
    head, usual = (build(kind, model__head_init=kind).model.head for kind in ("kaiming", "uniform"))
    assert not head.bias.any() and usual.bias.any()
    assert float(head.weight.std()) == pytest.approx((2 / head.out_features) ** 0.5, rel=0.1)
    with pytest.raises(InputError, match="did you mean 'kaiming'"):
        build("wrong", model__head_init="kaming")


def test_a_queue_has_the_size_that_is_set(build):
    assert build("rows", memory__size=5).memory.size == 5
    with pytest.raises(InputError, match=r"remove memory\.size"):
        build("slots", memory__size=5, memory__update="moving_average")


def test_a_frozen_batch_norm_keeps_its_statistics_through_a_step(build):
    for frozen in (True, False):
        run = build(f"frozen {frozen}", model__freeze_batch_norm=frozen)
        before = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
        run.model.train()
        _, images, _, _ = next(run.data.batches(0))
        run.model(images)
        assert (same(before, dict(run.model.named_buffers())) == []) is frozen


PROXIES = {"loss__name": "pml/ProxyAnchorLoss", "memory__ratio": 0.0}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory__update": "backprop"},
        {"memory__ratio": 0.0, "optim__schedule": "plateau", "data__holdout": 0.4, "log__evaluate_every": 3},
        PROXIES,
    ],
)
def test_what_is_saved_is_restored_whole(build, changes, tmp_path):
    run, other = build(**changes), build("other", **changes)
    if run.memory is not None:
        fill_memory(run, Progress())
    learn(run, 0, [next(run.data.batches(0))[1:]], run.memory is not None)
    run.drift(10, run.model)
    run.watcher.check({"step": 3, "mean_cosine": 1.0})
    run.sums += torch.rand(len(SUMS))
    run.summed, run.best = 3, 0.25
    run.plateau.step(1.0)
    torch.manual_seed(77)
    run.save(9, run.last)
    other.folder = run.folder
    assert other.restore() == 9
    drawn = torch.rand(3)
    torch.manual_seed(77)
    assert torch.equal(drawn, torch.rand(3))
    other.save(9, tmp_path / "again.pt")
    first, again = read_checkpoint(run.last), read_checkpoint(tmp_path / "again.pt")
    assert {*same(first, again)} <= {"/rng"}  # drawn from in between
    assert first["tallied"] == 3 and first["best"] == 0.25 and first["watch"]["said"] == ["collapse"] and first["step"] == 9


def test_a_checkpoint_of_other_data_is_refused(build, photos):
    run = build()
    run.save(3, run.last)
    names = run.dataset.train.class_names
    object.__setattr__(run.dataset.train, "class_names", [*names[:-1], "another"])
    with pytest.raises(InputError, match=r"trained on 36 images of 6 classes.*restore the data, or start a new run"):
        run.restore()


@pytest.mark.parametrize(("every", "wanted"), [(1, 10), (5, 10), (7, 14), (10, 10), (25, 25), (100, 100)])
def test_drift_is_due_only_where_a_line_of_metrics_is(build, every, wanted):
    assert build(log__every=every).drift.every == wanted


def test_probes_are_taken_evenly_from_the_training_set(build):
    run = build()
    indices = np.linspace(0, 35, 32).astype(int)
    assert torch.equal(run.drift.images, run.data.feed.test(indices))
    run.model.train()
    assert run.drift.embed(run.probe_model).shape == (32, 12) and run.model.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim__schedule": "stepp"}, "unknown optim.schedule 'stepp': did you mean 'step'"),
        ({"optim__precision": "fp8"}, "unknown optim.precision 'fp8': did you mean 'fp"),
        ({"model__trunk": "resnet5"}, "unknown trunk 'resnet5': did you mean 'resnet50'"),
        ({"model__pooling": "mean"}, "unknown pooling 'mean'"),
    ],
)
def test_settings_that_do_not_exist_are_refused(build, changes, message):
    with pytest.raises(InputError, match=message):
        build(**changes)


def test_precision_follows_the_device_unless_chosen(build):
    assert not build().autocast._enabled
    half = build("half", optim__precision="bf16").autocast
    assert half._enabled and half.fast_dtype == torch.bfloat16


def test_the_seed_decides_the_weights(build):
    torch.manual_seed(5)
    one = build("a").model.head.weight
    torch.manual_seed(6)
    assert torch.equal(one, build("b").model.head.weight) and not torch.equal(one, build("c", seed=1).model.head.weight)


DOUBTING = {"memory__update": "moving_average", "memory__doubt": "skip"}


def test_labels_are_checked_every_few_steps_and_less_often_for_many_images(build, monkeypatch):
    assert build(**DOUBTING).label_check_every == 10 and build("plain").label_check_every == 0
    monkeypatch.setattr(state, "CHECK_STEPS", 1)
    for pairs, every in ((36 * 6 // 2, 2), (1, 36 // 8)):  # 216 pairs: every other step; at least once per epoch
        monkeypatch.setattr(state, "CHECK_PAIRS", pairs)
        assert build(f"{pairs} pairs", **DOUBTING).label_check_every == every


def test_images_with_likely_wrong_labels_get_no_gradient(build, monkeypatch):
    run = build(**DOUBTING)
    _, images, labels, ids = next(run.data.batches(0))
    run.memory.stamps[ids[2]] = IGNORED
    embeddings = torch.nn.functional.normalize(torch.randn(8, 12)).requires_grad_()
    monkeypatch.setattr(run.model, "forward", lambda images: 1 * embeddings)
    monkeypatch.setattr(loop, "update_weights", lambda run: None)
    learn(run, 0, [(images, labels, ids)], True)
    assert (embeddings.grad != 0).any(1).tolist() == [k != 2 for k in range(8)]


CPU = torch.device("cpu")


def config(**changes):
    return override(Config(), {name.replace("__", "."): value for name, value in changes.items()})


def test_devices_are_picked_or_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert state.pick_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert state.pick_device("auto") == state.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="no GPU is visible"):
        state.pick_device("cuda")
    with pytest.raises(InputError, match="device 'gpu' does not exist"):
        state.pick_device("gpu")
    for name in ("meta", "hpu", "xpu"):
        with pytest.raises(InputError, match=f"device {name} is not available on this machine: use auto, cpu, cuda or mps"):
            state.pick_device(name)


def test_a_crop_of_which_the_trunk_leaves_nothing_is_refused():
    small = {"model__trunk": "small", "model__weights": "none", "model__dim": 5}
    with pytest.raises(InputError, match=r"data.crop=1 is too small for small: use a larger data.crop"):
        state.model_of(config(data__crop=1, **small))
    assert state.model_of(config(data__crop=32, **small)).training


@pytest.mark.parametrize("ratio", [0, 1])
@pytest.mark.parametrize("name", ["update", "reduction", "spread", "dtype", "doubt"])
def test_a_name_that_there_is_not_is_refused_with_memory_and_without(name, ratio):
    for value in ("foo", ""):
        with pytest.raises(InputError, match=f"unknown memory.{name} '{value}'"):
            state.memory_of(config(**{"memory__ratio": ratio, f"memory__{name}": value}), 9, CPU)


def test_a_run_is_advised_what_its_config_lacks_and_its_data_allow():
    def watcher(labels=(0, 0, 1), **changes):
        chosen = config(model__dim=5, **changes)
        return watcher_of(chosen, chosen.memory.ratio and round(chosen.memory.ratio * len(labels)), np.asarray(labels))

    plain = watcher(memory__ratio=0.7)
    assert plain.remedies == ("memory.reduction=balanced", "memory.batch_weight=1") and plain.smaller and plain.larger
    ours = watcher(memory__reduction="balanced", memory__batch_weight=1)
    assert ours.remedies == () and ours.smaller and not ours.larger and not ours.summed
    assert watcher(loss__name="multi_similarity").remedies == ("memory.batch_weight=1",)  # it holds itself back
    assert not watcher(memory__update="moving_average").smaller  # a slot an image
    assert plain.negatives and plain.positives
    assert not watcher((0, 0, 0)).negatives and watcher((0, 0, 0)).positives
    assert not watcher((0, 1, 2)).positives and watcher((0, 1, 2)).negatives
    assert watcher(memory__ratio=0).remedies == ()


@pytest.mark.parametrize(
    ("ratio", "update", "images", "size"),
    [(1.0, "queue", 37, 37), (0.2, "queue", 37, 7), (0.5, "queue", 7, 4), (1e-4, "queue", 37, 1), (1.0, "backprop", 37, 37)],
)
def test_the_memory_holds_the_ratio_of_the_images(ratio, update, images, size):
    memory = state.memory_of(config(memory__ratio=ratio, memory__update=update, model__dim=5), images, CPU)
    assert memory.rows.shape == (size, 5) and memory.update == update


def test_no_ratio_no_memory():
    assert state.memory_of(config(memory__ratio=0), 37, CPU) is None


def test_the_memorys_settings_reach_it():
    chosen = {"memory__update": "backprop", "memory__alpha": 0.3, "memory__momentum": 0.8, "memory__dtype": "float64"}
    memory = state.memory_of(config(**chosen), 9, CPU)
    assert (memory.alpha, memory.momentum, memory.rows.dtype) == (0.3, 0.8, torch.float64)
    assert state.memory_of(config(memory__update="moving_average"), 9, CPU).momentum == 0.9


def test_memories_that_cannot_be_are_refused():
    with pytest.raises(InputError, match=r"keeps one slot per image: set memory.ratio=1"):
        state.memory_of(config(memory__ratio=0.5, memory__update="backprop"), 9, CPU)
    with pytest.raises(InputError, match="did you mean 'float16'"):
        state.memory_of(config(memory__dtype="float15"), 9, CPU)
    with pytest.raises(InputError, match="did you mean 'skip'"):
        state.memory_of(config(memory__doubt="skipp"), 9, CPU)
    with pytest.raises(InputError, match=r"which a queue does not have: set memory.doubt=keep"):
        state.memory_of(config(memory__doubt="skip"), 9, CPU)
    keyed = config(memory__doubt="skip", memory__update="moving_average", memory__spread="sharded")
    with pytest.raises(InputError, match=r"a part of a sharded memory: set memory.doubt=keep, or memory.spread=replicated"):
        state.memory_of(keyed, 9, CPU, world=2)
    assert state.memory_of(keyed, 9, CPU).size == 9
    assert state.memory_of(config(memory__doubt="skip", memory__ratio=0), 9, CPU) is None
    slow = {"memory__update": "moving_average", "memory__momentum": 0.99}
    with pytest.raises(InputError, match=r"less than memory.dtype=bfloat16 can represent: set memory.dtype=float32"):
        state.memory_of(config(memory__dtype="bfloat16", **slow), 9, CPU)
    with pytest.raises(InputError, match=r"memory.update=backprop moves rows by less than memory.dtype=float16 can represent"):
        state.memory_of(config(memory__dtype="float16", memory__update="backprop"), 9, CPU)
    assert state.memory_of(config(**slow), 9, CPU).momentum == 0.99
    with pytest.raises(InputError, match="did you mean 'queue'"):
        state.memory_of(config(memory__update="que"), 9, CPU)


def test_batch_norm_is_frozen_when_asked():
    for frozen in (False, True):
        model = state.model_of(config(model__trunk="small", model__weights="none", model__freeze_batch_norm=frozen)).train()
        norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        assert norms and all(norm.training is not frozen for norm in norms)


def test_a_queue_on_a_gpu_holds_half_rows_unless_told():
    gpu = torch.device("cuda")
    assert state.memory_of(config(), 9, gpu).rows.dtype == torch.bfloat16
    assert state.memory_of(config(memory__update="moving_average"), 9, gpu).rows.dtype == torch.float32
    assert state.memory_of(config(memory__dtype="float32"), 9, gpu).rows.dtype == torch.float32
    assert state.memory_of(config(), 9, CPU).rows.dtype == torch.float32
