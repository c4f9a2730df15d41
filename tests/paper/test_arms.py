from paper.arms import contrastive, loss_arms, memory_of, queue, sized
from paper.experiment import config_of, setting_of
from paper.record import identity
from tests.paper.made_up import CARS


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
