import math

import numpy as np
import pytest
import torch

from tests.tiny import same, tiny_config
from xbm.errors import InputError
from xbm.losses import ContrastiveLoss, MultiSimilarityLoss
from xbm_app.data.feeds import DecodeFeed, ResidentFeed, StoreFeed
from xbm_app.data.images import ImageSet
from xbm_app.data.samplers import PKSampler, ShuffleSampler
from xbm_app.data.store import prepare
from xbm_app.files import read_checkpoint
from xbm_app.train import state as task
from xbm_app.train.config import Config, override
from xbm_app.train.dataset import begin_run, read_data
from xbm_app.train.label_errors import IGNORED
from xbm_app.train.state import SUMS as TALLY
from xbm_app.train.state import RunState


@pytest.fixture
def job(photos, tmp_path):
    def make(name: str = "run", **changes) -> RunState:
        config = tiny_config(photos, **changes)
        return RunState(config, begin_run(config, tmp_path / name), tmp_path / name)

    return make














def tracked(told):
    def track(items, description, total):
        try:
            told.append(total)
            yield from items
        finally:  # a bar that has to be taken down, also where the memory is full before all images have come
            told.append("closed")

    return track


@pytest.mark.parametrize(
    ("changes", "filled"),
    [
        ({}, 36),
        ({"memory__ratio": 0.7}, 25),
        ({"memory__ratio": 0.7, "memory__fill": False}, 0),
        ({"memory__update": "moving_average"}, 36),
        ({"memory__update": "backprop", "batch__size": 10}, 36),
        ({"memory__update": "backprop", "memory__fill": False}, 0),
        ({"memory__update": "moving_average", "optim__iterations": 3}, 24),  # no more than the run trains on
    ],
)
def test_the_memory_starts_full_or_empty_as_the_recipe_says(job, changes, filled):
    made = job(**changes)
    statistics = {name: buffer.clone() for name, buffer in made.model.named_buffers()}
    told = []
    made.start_memory(tracked(told))
    size = made.config.batch.size
    assert len(made.memory) == filled
    assert told == ([math.ceil(min(36, size * made.config.optim.iterations) / size), "closed"] if filled else [])
    assert torch.equal(made.memory.labels, torch.from_numpy(made.dataset.train.labels)[made.memory.ids])
    assert same(statistics, dict(made.model.named_buffers())) == []  # filling leaves no trace in the model


def test_extra_batches_fill_the_memory_and_leave_no_trace_in_the_model(job):
    made = job(memory__updates_per_step=3)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    iteration = next(made.iterations(0))
    made.enqueue_extra(iteration.extra)
    assert made.memory.ids.tolist() == [each for ids in ids_of(iteration.extra) for each in ids]
    assert same(before, dict(made.model.state_dict())) == []
    assert not made.memory.rows.requires_grad


def test_the_trunk_learns_at_its_share_and_both_decay(job):
    made = job(model__trunk_lr=0.1, optim__lr=1e-2, optim__decay_at=(5, 9), optim__weight_decay=0.25)
    rates = {}
    for step in (0, 4, 5, 8, 9, 16):
        made.set_learning_rate(step)
        assert made.learning_rate() == pytest.approx([1e-2, 1e-3, 1e-4][(step >= 5) + (step >= 9)])
        rates[step] = {group["name"]: group["lr"] for group in made.optimizer.param_groups}
    assert rates[4] == pytest.approx({"trunk": 1e-3, "head": 1e-2})
    assert rates[16] == pytest.approx({"trunk": 1e-5, "head": 1e-4})
    assert {group["weight_decay"] for group in made.optimizer.param_groups} == {0.25}
    assert isinstance(made.optimizer, torch.optim.Adam)
    counted = sum(len(group["params"]) for group in made.optimizer.param_groups)
    assert counted == len(list(made.model.parameters()))


def test_a_plateau_lowers_the_rate_only_once_the_memory_is_full(job):
    made = job(optim__schedule="plateau", memory__fill=False)
    for loss in range(20):
        made.heed(float(loss))
    made.set_learning_rate(3)
    assert made.learning_rate() == 1e-3
    made.memory.fill(made.model, made.random_images(made.random_parts()))
    for loss in range(7):
        made.heed(float(loss))
    made.set_learning_rate(3)
    assert made.learning_rate() == pytest.approx(1e-4)
    steady = job("steady", optim__schedule="step")
    for loss in range(20):
        steady.heed(float(loss))
    steady.set_learning_rate(3)
    assert steady.learning_rate() == 1e-3


def test_a_frozen_batch_norm_keeps_its_statistics_through_a_step(job):
    for frozen in (True, False):
        made = job(f"frozen {frozen}", model__freeze_batch_norm=frozen)
        before = {name: buffer.clone() for name, buffer in made.model.named_buffers()}
        made.model.train()
        ((images, _, _),) = next(made.iterations(0)).anchors
        made.model(images)
        assert (same(before, dict(made.model.named_buffers())) == []) is frozen


@pytest.mark.parametrize("changes", [{}, {"memory__update": "backprop"}, {"memory__ratio": 0.0, "optim__schedule": "plateau"}])
def test_what_is_saved_is_restored_whole(job, changes, tmp_path):
    made, other = job(**changes), job("other", **changes)
    if made.memory is not None:
        made.start_memory(tracked([]))
    made.model(made.drift.images).sum().backward()
    made.update()
    made.drift(10, made.model)
    made.watch.look({"step": 3, "mean_cosine": 1.0})
    made.tally += torch.rand(len(TALLY))
    made.tallied, made.best = 3, 0.25
    made.plateau.step(1.0)
    torch.manual_seed(77)
    made.save(9)
    other.folder = made.folder
    assert other.restore() == 9
    drawn = torch.rand(3)
    torch.manual_seed(77)
    assert torch.equal(drawn, torch.rand(3))
    other.save(9, tmp_path / "again.pt")
    first, again = read_checkpoint(made.last), read_checkpoint(tmp_path / "again.pt")
    assert {*same(first, again)} <= {"/rng"}  # drawn from in between
    assert first["tallied"] == 3 and first["best"] == 0.25 and first["watch"]["said"] == ["collapse"] and first["step"] == 9


def test_a_checkpoint_of_other_data_is_refused(job, photos):
    made = job()
    made.save(3)
    names = made.dataset.train.class_names
    object.__setattr__(made.dataset.train, "class_names", [*names[:-1], "another"])
    with pytest.raises(InputError, match=r"trained on 36 images of 6 classes.*restore the data, or start a new run"):
        made.restore()


@pytest.mark.parametrize(("every", "wanted"), [(1, 10), (5, 10), (7, 14), (10, 10), (25, 25), (100, 100)])
def test_drift_is_due_only_where_a_line_of_metrics_is(job, every, wanted):
    assert job(log__every=every).drift.every == wanted


def test_probes_are_spread_over_the_training_set(job):
    made = job()
    spread = np.linspace(0, 35, 32).astype(int)
    assert torch.equal(made.drift.images, made.feed.test(spread))
    made.model.train()
    assert made.probe().shape == (32, 12) and made.model.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim__schedule": "stepp"}, "unknown optim.schedule 'stepp': did you mean 'step'"),
        ({"optim__precision": "fp8"}, "unknown optim.precision 'fp8': did you mean 'fp"),
        ({"model__trunk": "resnet5"}, "unknown trunk 'resnet5': did you mean 'resnet50'"),
        ({"model__pooling": "mean"}, "unknown pooling 'mean'"),
    ],
)
def test_a_job_that_cannot_be_is_refused(job, changes, message):
    with pytest.raises(InputError, match=message):
        job(**changes)


def test_precision_follows_the_device_unless_chosen(job):
    assert job().precision == torch.float32
    assert job("half", optim__precision="bf16").precision == torch.bfloat16


def test_the_seed_decides_the_weights(job):
    torch.manual_seed(5)
    one = job("a").model.head.weight
    torch.manual_seed(6)
    assert torch.equal(one, job("b").model.head.weight) and not torch.equal(one, job("c", seed=1).model.head.weight)


DOUBTING = {"memory__update": "moving_average", "memory__doubt": "skip"}


def test_labels_are_looked_at_every_few_steps_and_seldom_where_that_is_much(job, monkeypatch):
    made, looks = job(**DOUBTING), []
    monkeypatch.setattr("xbm_app.train.loop.ignore_label_errors", lambda memory, classes: looks.append((memory, classes)))
    for done in range(1, 31):
        made.doubt_labels(done)
    assert looks == [(made.memory, 6)] * 3
    monkeypatch.setattr("xbm_app.train.state.LOOK", 1)
    for compared, times in ((36 * 6 // 2, 15), (1, 7)):  # 216 pairs: every other step; at most as long as it takes to meet all
        monkeypatch.setattr("xbm_app.train.state.COMPARED", compared)
        looks.clear()
        for done in range(1, 31):
            made.doubt_labels(done)
        assert len(looks) == times
    job("plain").doubt_labels(10)
    assert len(looks) == 7


def test_what_is_set_aside_learns_nothing(job):
    made, ids = job(**DOUBTING), torch.tensor([3, 0, 7])
    made.memory.stamps[7] = IGNORED
    anchors = torch.randn(3, 8, requires_grad=True)
    found = made.learning(anchors, ids)
    (gradient,) = torch.autograd.grad((2 * found).sum(), anchors)
    assert torch.equal(found, anchors) and gradient[:, 0].tolist() == [2, 2, 0]
    plain = job("plain", memory__update="moving_average")
    assert plain.learning(anchors, ids) is anchors


CPU = torch.device("cpu")


def config(**changes):
    return override(Config(), {name.replace("__", "."): value for name, value in changes.items()})


def test_devices_are_picked_or_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert task.pick_device("auto") == task.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="no GPU is visible"):
        task.pick_device("cuda")
    with pytest.raises(InputError, match="there is no device 'gpu'"):
        task.pick_device("gpu")
    for name in ("meta", "hpu", "xpu"):
        with pytest.raises(InputError, match=f"device {name} cannot be used on this machine: use auto, cpu or cuda"):
            task.pick_device(name)


def test_a_crop_of_which_the_trunk_leaves_nothing_is_refused():
    small = {"model__trunk": "small", "model__weights": "none", "model__dim": 5}
    with pytest.raises(InputError, match=r"data.crop=1 is too small for small: give a larger data.crop"):
        task.model_of(config(data__crop=1, **small))
    assert task.model_of(config(data__crop=32, **small)).training


@pytest.mark.parametrize("ratio", [0, 1])
@pytest.mark.parametrize("name", ["update", "reduction", "spread", "dtype", "doubt"])
def test_a_name_that_there_is_not_is_refused_with_memory_and_without(name, ratio):
    for value in ("foo", ""):
        with pytest.raises(InputError, match=f"unknown memory.{name} '{value}'"):
            task.memory_of(config(**{"memory__ratio": ratio, f"memory__{name}": value}), 9, CPU)


def test_a_run_is_advised_what_its_config_lacks_and_its_data_allow():
    def watch(labels=(0, 0, 1), **changes):
        chosen = config(model__dim=5, **changes)
        return task.watch_of(chosen, task.memory_of(chosen, len(labels), CPU), np.asarray(labels))

    plain = watch(memory__ratio=0.7)
    assert plain.remedies == ("memory.reduction=balanced", "memory.batch_weight=1") and plain.smaller and plain.larger
    ours = watch(memory__reduction="balanced", memory__batch_weight=1)
    assert ours.remedies == () and ours.smaller and not ours.larger and not ours.summed
    assert watch(loss__name="multi_similarity").remedies == ("memory.batch_weight=1",)  # it holds itself back
    assert not watch(memory__update="moving_average").smaller  # a slot an image
    assert plain.negatives and plain.positives
    assert not watch((0, 0, 0)).negatives and watch((0, 0, 0)).positives
    assert not watch((0, 1, 2)).positives and watch((0, 1, 2)).negatives
    assert watch(memory__ratio=0).remedies == ()


@pytest.mark.parametrize(
    ("ratio", "update", "images", "size"),
    [(1.0, "queue", 37, 37), (0.2, "queue", 37, 7), (0.5, "queue", 7, 4), (1e-4, "queue", 37, 1), (1.0, "backprop", 37, 37)],
)
def test_the_memory_holds_the_ratio_of_the_images(ratio, update, images, size):
    memory = task.memory_of(config(memory__ratio=ratio, memory__update=update, model__dim=5), images, CPU)
    assert memory.rows.shape == (size, 5) and memory.update == update


def test_no_ratio_no_memory():
    assert task.memory_of(config(memory__ratio=0), 37, CPU) is None


def test_the_memorys_settings_reach_it():
    chosen = {"memory__update": "backprop", "memory__alpha": 0.3, "memory__momentum": 0.8, "memory__dtype": "float64"}
    memory = task.memory_of(config(**chosen), 9, CPU)
    assert (memory.alpha, memory.momentum, memory.rows.dtype) == (0.3, 0.8, torch.float64)
    assert task.memory_of(config(memory__update="moving_average"), 9, CPU).momentum == 0.9


def test_memories_that_cannot_be_are_refused():
    with pytest.raises(InputError, match=r"keeps one slot an image: memory.ratio must be 1"):
        task.memory_of(config(memory__ratio=0.5, memory__update="backprop"), 9, CPU)
    with pytest.raises(InputError, match="did you mean 'float16'"):
        task.memory_of(config(memory__dtype="float15"), 9, CPU)
    with pytest.raises(InputError, match="did you mean 'skip'"):
        task.memory_of(config(memory__doubt="skipp"), 9, CPU)
    with pytest.raises(InputError, match=r"a queue has none for each: set memory.doubt=keep"):
        task.memory_of(config(memory__doubt="skip"), 9, CPU)
    keyed = config(memory__doubt="skip", memory__update="moving_average", memory__spread="sharded")
    with pytest.raises(InputError, match=r"a part on each process: set memory.doubt=keep, or memory.spread=replicated"):
        task.memory_of(keyed, 9, CPU, world=2)
    assert task.memory_of(keyed, 9, CPU).size == 9
    assert task.memory_of(config(memory__doubt="skip", memory__ratio=0), 9, CPU) is None
    slow = {"memory__update": "moving_average", "memory__momentum": 0.99}
    with pytest.raises(InputError, match=r"less than memory.dtype=bfloat16 can tell: set memory.dtype=float32"):
        task.memory_of(config(memory__dtype="bfloat16", **slow), 9, CPU)
    with pytest.raises(InputError, match=r"memory.update=backprop moves rows by less than memory.dtype=float16 can tell"):
        task.memory_of(config(memory__dtype="float16", memory__update="backprop"), 9, CPU)
    assert task.memory_of(config(**slow), 9, CPU).momentum == 0.99
    with pytest.raises(InputError, match="did you mean 'queue'"):
        task.memory_of(config(memory__update="que"), 9, CPU)


def test_the_losss_settings_reach_it():
    loss = task.loss_of(config(loss__options={"margin": 0.3}, loss__reduction="mean", loss__exclude="instance"))
    assert isinstance(loss, ContrastiveLoss) and (loss.margin, loss.reduction, loss.exclude) == (0.3, "mean", "instance")
    assert isinstance(task.loss_of(config(loss__name="multi_similarity")), MultiSimilarityLoss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss__name": "contrastiv"}, "unknown loss 'contrastiv': did you mean 'contrastive'"),
        ({"loss__options": {"marign": 0.3}}, "loss.options=.*marign.* do not fit the contrastive loss"),
        ({"loss__reduction": "men"}, "did you mean 'mean'"),
    ],
)
def test_losses_that_cannot_be_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        task.loss_of(config(**changes))










def test_batch_norm_is_frozen_when_asked():
    for frozen in (False, True):
        model = task.model_of(config(model__trunk="small", model__weights="none", model__freeze_batch_norm=frozen)).train()
        norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        assert norms and all(norm.training is not frozen for norm in norms)


def test_a_queue_on_a_gpu_holds_half_rows_unless_told():
    gpu = torch.device("cuda")
    assert task.memory_of(config(), 9, gpu).rows.dtype == torch.bfloat16
    assert task.memory_of(config(memory__update="moving_average"), 9, gpu).rows.dtype == torch.float32
    assert task.memory_of(config(memory__dtype="float32"), 9, gpu).rows.dtype == torch.float32
    assert task.memory_of(config(), 9, CPU).rows.dtype == torch.float32
