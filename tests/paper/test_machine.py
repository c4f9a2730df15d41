import pytest

from paper.experiment import Setting, base
from paper.machine import machine_of
from xbm.errors import InputError


@pytest.fixture
def places(tmp_path):
    (tmp_path / "cars").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "dataset.json").write_text("{}")
    (tmp_path / "w.safetensors").touch()
    return tmp_path


def test_every_data_set_with_every_trunk(places):
    weights = places / "w.safetensors"
    machine = machine_of([f"cars={places / 'cars'}", "glyphs"], ["efficientnet_lite0", f"resnet50_v1={weights}"])
    assert machine.settings() == [
        Setting("cars", "efficientnet_lite0", "imagenet"),
        Setting("cars", "resnet50_v1", "w.safetensors"),
        Setting("glyphs", "small", "none"),
    ]
    assert machine_of([f"cars={places / 'cars'}"], []).settings() == [Setting("cars", "googlenet", "imagenet")]


def test_paths_go_into_the_config_of_a_run_and_a_store_is_told_from_images(places):
    machine = machine_of([f"cars={places / 'cars'}"], [f"resnet50_v1={places / 'w.safetensors'}"])
    placed = machine.place(base(machine.settings()[0]))
    assert placed.data.root == str(places / "cars") and placed.data.store is None
    assert placed.model.weights == str(places / "w.safetensors")
    stored = machine_of([f"cars={places / 'store'}"], ["efficientnet_lite0"])
    placed = stored.place(base(stored.settings()[0]))
    assert placed.data.root is None and placed.data.store == str(places / "store") and placed.model.weights == "imagenet"
    glyphs = machine_of(["glyphs"], [])
    assert glyphs.place(base(glyphs.settings()[0])).data.root is None


@pytest.mark.parametrize(
    ("data", "trunks", "message"),
    [
        ([], [], "--data cars=DIR"),
        (["cars"], [], "write --data cars=DIR"),
        (["carz=x"], [], "did you mean 'cars'"),
        (["cars=/nowhere/at/all"], [], "there is no folder"),
        (["glyphs"], ["resnet50"], "leave --trunk out"),
        (["glyphs"], ["resnet50_v1=/nowhere.pth"], "there is no file"),
    ],
)
def test_mistakes_are_told_in_one_sentence(data, trunks, message):
    with pytest.raises(InputError, match=message):
        machine_of(data, trunks)
