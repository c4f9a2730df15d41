import pytest

from paper.experiment import (
    SMALL,
    Arm,
    Experiment,
    Setting,
    base,
    config_of,
    contrastive,
    grid,
    loss_arms,
    memory_of,
    queue,
    setting_of,
    sized,
)
from paper.record import identity
from tests.paper.made_up import CARS
from xbm_app.train.config import check


@pytest.mark.parametrize("data", ["sop", "inshop", "vehicleid", "cub", "cars", "deepfashion2", "omniglot", "glyphs"])
def test_every_data_set_has_a_base_that_can_start(data):
    config = base(setting_of(data))
    check(config)
    assert config.data.name == data and config.memory.batch_weight == 1 and config.memory.update == "queue"
    assert config.log.every % 10 == 0  # drift is measured then


def test_cars_is_the_recipe_of_the_first_measurements():
    config = base(setting_of("cars", "efficientnet_lite0"))
    assert (config.optim.lr, config.optim.iterations, config.optim.decay_at) == (1e-4, 2000, (1400,))
    assert (config.memory.start, config.memory.fill, config.memory.ratio, config.batch.size) == (0, False, 1.0, 64)
    assert config.data.augmentation == "paper" and config.loss.reduction == "sum" and config.model.dim == 512


def test_little_drawings_have_a_net_of_their_own():
    assert all(setting_of(data, "resnet50") == Setting(data, "small", "none") for data in SMALL)
    assert setting_of("cars") == Setting("cars", "googlenet", "imagenet")
    assert base(setting_of("omniglot")).loss.reduction == "mean"


def test_every_method_has_as_many_rates_to_choose_from():
    assert len({len(grid(setting_of("cars", trunk))) for trunk in ("googlenet", "resnet50_v1", "efficientnet_lite0")}) == 1
    assert min(grid(setting_of("cars", "resnet50_v1"))) < min(grid(setting_of("cars", "efficientnet_lite0")))


def test_a_miniature_is_small_whatever_the_arm_asks_for():
    setting = Setting("glyphs", "small", "none", mini=True)
    config = config_of(setting, {"optim.iterations": 5000, "batch.size": 256, "memory.start": 1000})
    assert config.optim.iterations < 50 and config.batch.size == 32 and config.memory.start < config.optim.iterations
    assert config_of(Setting("glyphs", "small", "none"), {"optim.iterations": 5000}).optim.iterations == 5000


def test_labels_say_what_the_weights_are():
    assert setting_of("cars").label == "cars, googlenet (ImageNet)"
    assert Setting("cars", "resnet50_v1", "w.safetensors").label == "cars, resnet50_v1 (w.safetensors)"


def test_an_experiment_says_whom_it_suits():
    only = Experiment("x", "", "", ("sop",), lambda s: [Arm("a", {})], lambda d, s: [], elsewhere=False)
    assert only.suits(setting_of("sop")) and not only.suits(setting_of("cars"))


def test_the_memory_of_cub_and_cars_is_table_7s_moving_average():
    assert memory_of(CARS)["memory.update"] == "moving_average" and memory_of(CARS)["memory.momentum"] == 0.9
    assert memory_of(setting_of("sop"))["memory.update"] == "queue"


def test_with_and_without_memory_differ_in_the_memory_alone():
    for setting in (CARS, setting_of("sop"), setting_of("omniglot")):
        arms = {arm.label: config_of(setting, arm.settings) for arm in loss_arms(setting)}
        for label, config in arms.items():
            other = identity(arms[label.removesuffix(" w/ M")])
            assert {name.split(".")[0] for name, v in identity(config).items() if v != other[name]} <= {"memory"}
            assert bool(config.memory.ratio) == label.endswith(" w/ M")


def test_a_queue_of_the_whole_set_is_batch_64_at_ratio_1():
    assert identity(config_of(CARS, queue(CARS).settings)) == identity(
        config_of(CARS, sized(CARS, "contrastive", 64, 1.0).settings)
    )
    full = sized(CARS, "contrastive", 64, 1.0)
    assert full.measures == queue(CARS).measures and sized(CARS, "contrastive", 32, 1.0).measures == ()
    off = sized(CARS, "contrastive", 64, 0.0)
    assert identity(config_of(CARS, off.settings)) == identity(config_of(CARS, contrastive(CARS)[0].settings))


def test_a_small_ratio_takes_the_rate_of_the_whole_memory():
    arm = sized(CARS, "contrastive", 16, 0.01, "shuffle")
    assert arm.choose["memory.ratio"] == 1 and arm.choose["batch.size"] == 64 and arm.choose["batch.sampler"] == "pk"
    assert sized(CARS, "MS", 16, 0.0).choose["memory.ratio"] == 0 and arm.settings["batch.sampler"] == "shuffle"
