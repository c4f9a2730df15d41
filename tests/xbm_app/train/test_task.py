import numpy as np
import pytest
import torch

from tests.tiny import tiny_config
from xbm.errors import InputError
from xbm.losses import ContrastiveLoss, MultiSimilarityLoss
from xbm_app.data.feeds import DecodeFeed, ResidentFeed, StoreFeed
from xbm_app.data.images import ImageSet
from xbm_app.data.samplers import PKSampler, ShuffleSampler
from xbm_app.data.store_writer import prepare
from xbm_app.train import task
from xbm_app.train.config import Config, override
from xbm_app.train.dataset import read_data

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


@pytest.mark.parametrize("kind", ["pk", "shuffle"])
def test_the_ranks_samplers_share_the_batches_of_one(kind, photos):
    chosen = config(batch__size=6, batch__per_class=2, batch__sampler=kind)
    images = read_data(tiny_config(photos).data).train
    for k in (0, 3):
        parts = [task.sampler_of(images, chosen, rank, 3).batch(k) for rank in range(3)]
        assert np.concatenate(parts).tolist() == task.sampler_of(images, chosen).batch(k).tolist()


def test_samplers():
    images = ImageSet("made", np.repeat(np.arange(5), 3), list("abcde"), pixels=np.zeros((15, 4, 4), np.uint8))
    sampler = task.sampler_of(images, config(batch__size=6, batch__per_class=2))
    assert isinstance(sampler, PKSampler) and len(np.unique(images.labels[sampler.batch(3)])) == 3
    assert isinstance(task.sampler_of(images, config(batch__size=6, batch__sampler="shuffle")), ShuffleSampler)
    with pytest.raises(InputError, match=r"batch.size=7 is not a multiple of batch.per_class=2"):
        task.sampler_of(images, config(batch__size=7, batch__per_class=2))
    with pytest.raises(InputError, match="did you mean 'shuffle'"):
        task.sampler_of(images, config(batch__sampler="shufle"))


def test_the_feed_suits_the_set(photos, tmp_path):
    chosen = tiny_config(photos)
    images = read_data(chosen.data).train
    augmentation = task.augmentation_of(chosen, task.model_of(chosen))

    def feed(of=images, **changes):
        return task.feed_of(of, tiny_config(photos, **changes), augmentation, torch.device("cpu"))

    assert type(feed()) is DecodeFeed
    pixels = np.stack([np.asarray(images.open(k)) for k in range(len(images))])
    assert type(feed(ImageSet("made", images.labels, images.class_names, pixels=pixels))) is ResidentFeed
    store = str(prepare(images, tmp_path / "store", resize=16, quiet=True))
    assert type(feed(data__store=store)) is StoreFeed
    assert type(feed(data__store=store, data__feed="resident")) is ResidentFeed
    assert type(feed(data__store=store, data__feed="decode")) is DecodeFeed
    batches = [feed(data__store=s, data__feed=f).train(np.array([5, 2]), 3) for s, f in ((store, "store"), (None, "decode"))]
    assert torch.equal(*batches)
    with pytest.raises(InputError, match="make one with `xbm prepare`"):
        feed(data__feed="store")
    with pytest.raises(InputError, match="did you mean 'resident'"):
        feed(data__feed="residnt")


def test_augmentations():
    model = task.model_of(config(model__trunk="small", model__weights="none"))
    kinds = {name: task.augmentation_of(config(data__augmentation=name), model) for name in task.KINDS}
    assert {name: (a.kind, a.flip, a.padding, a.channels) for name, a in kinds.items()} == {
        "paper": ("crop", True, 0, 1), "official": ("resized_crop", True, 0, 1), "shift": ("shift", False, 14, 1),
        "none": ("none", False, 0, 1),
    }  # fmt: skip
    assert kinds["paper"].resize == 256 and kinds["paper"].crop == 224
    with pytest.raises(InputError, match="did you mean 'paper'"):
        task.augmentation_of(config(data__augmentation="papr"), model)


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
