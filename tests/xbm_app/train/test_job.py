import math

import numpy as np
import pytest
import torch

from tests.tiny import same, tiny_config
from xbm.errors import InputError
from xbm_app.train.checkpoint import read_checkpoint
from xbm_app.train.dataset import begin_run
from xbm_app.train.job import TALLY, Job
from xbm_app.train.label_errors import ASIDE


@pytest.fixture
def job(photos, tmp_path):
    def make(name: str = "run", **changes) -> Job:
        config = tiny_config(photos, **changes)
        return Job(config, begin_run(config, tmp_path / name), tmp_path / name)

    return make


def ids_of(batches) -> list[list[int]]:
    return [ids.tolist() for _, _, ids in batches]


def test_an_iteration_is_a_batch_of_the_sampler_from_any_start(job):
    made = job()
    wanted = [made.sampler.batch(step).tolist() for step in range(17)]
    for start in (0, 5, 16, 17):
        found = list(made.iterations(start))
        assert [each.step for each in found] == list(range(start, 17))
        assert [ids_of(each.anchors) for each in found] == [[ids] for ids in wanted[start:]]
        assert all(each.extra == [] for each in found)


def test_labels_and_images_belong_to_the_ids(job):
    made = job()
    for step, _, ((images, labels, ids),) in made.iterations(14):
        assert torch.equal(labels, torch.from_numpy(made.dataset.train.labels)[ids])
        assert torch.equal(images, made.feed.train(ids.numpy(), step))


@pytest.mark.parametrize(("updates", "parts"), [(3, 1), (1, 2), (2, 3)])
def test_more_batches_an_iteration_are_shared_out_in_order(job, updates, parts):
    made = job(memory__updates_per_step=updates, batch__accumulate=parts, optim__iterations=4)
    each = updates * parts
    assert made.batches_per_step == each
    for step, extra, anchors in made.iterations(1):
        ticks = range(step * each, step * each + each)
        assert ids_of(anchors) == [made.sampler.batch(t).tolist() for t in ticks if t % updates == updates - 1]
        assert ids_of(extra) == [made.sampler.batch(t).tolist() for t in ticks if t % updates != updates - 1]
        assert (len(anchors), len(extra)) == (parts, parts * (updates - 1))


def test_without_memory_nothing_extra_is_read(job):
    made = job(memory__ratio=0.0, memory__updates_per_step=5)
    assert made.memory is None and made.batches_per_step == 1
    assert all(each.extra == [] for each in made.iterations(10))


@pytest.mark.parametrize("size", [5, 7, 36, 64])
def test_random_images_are_all_of_them_once_in_views_that_training_never_shows(job, size):
    made = job(batch__size=size, batch__sampler="shuffle") if size < 64 else job()
    made.config = tiny_config(made.config.data.root, batch__size=size)
    parts = list(made.random_images(made.random_parts()))
    ids = torch.cat([ids for _, _, ids in parts])
    assert sorted(ids.tolist()) == list(range(36)) and ids.tolist() != list(range(36))
    assert all(1 < len(part[2]) <= size for part in parts)  # batch norm cannot do with one
    assert torch.equal(torch.cat([labels for _, labels, _ in parts]), torch.from_numpy(made.dataset.train.labels)[ids])
    views = [made.feed.train(parts[0][2].numpy(), step) for step in (-1, *range(17))]
    assert torch.equal(parts[0][0], views[0]) and not any(torch.equal(parts[0][0], view) for view in views[1:])


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
    monkeypatch.setattr("xbm_app.train.job.set_aside", lambda memory, classes: looks.append((memory, classes)))
    for done in range(1, 31):
        made.doubt_labels(done)
    assert looks == [(made.memory, 6)] * 3
    monkeypatch.setattr("xbm_app.train.job.LOOK", 1)
    for compared, times in ((36 * 6 // 2, 15), (1, 7)):  # 216 pairs: every other step; at most as long as it takes to meet all
        monkeypatch.setattr("xbm_app.train.job.COMPARED", compared)
        looks.clear()
        for done in range(1, 31):
            made.doubt_labels(done)
        assert len(looks) == times
    job("plain").doubt_labels(10)
    assert len(looks) == 7


def test_what_is_set_aside_learns_nothing(job):
    made, ids = job(**DOUBTING), torch.tensor([3, 0, 7])
    made.memory.stamps[7] = ASIDE
    anchors = torch.randn(3, 8, requires_grad=True)
    found = made.learning(anchors, ids)
    (gradient,) = torch.autograd.grad((2 * found).sum(), anchors)
    assert torch.equal(found, anchors) and gradient[:, 0].tolist() == [2, 2, 0]
    plain = job("plain", memory__update="moving_average")
    assert plain.learning(anchors, ids) is anchors
