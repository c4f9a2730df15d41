import pytest

from paper.experiment import SMALL, Arm, Experiment, Setting, base, config_of, grid, setting_of
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
