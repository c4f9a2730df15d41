import pytest
import yaml

from tests.tiny import xbm
from xbm_app.train.config import from_dict, load
from xbm_app.train.presets import DATASETS, preset


def rows_of(out):
    return {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") > 5}


def test_the_list_follows_the_options():
    code, out, _ = xbm("presets")
    assert code == 0 and "moving_average, m 0.9" in rows_of(out)["cars"] and "recipe `auto`" in out
    code, out, _ = xbm("presets", "--loss", "ms", "--trunk", "resnet50", "--recipe", "official")
    assert code == 0 and "resnet50" in rows_of(out)["cars"] and "128" in rows_of(out)["cars"] and "recipe `official`" in out
    assert "glyphs" not in rows_of(out)


def test_the_list_holds_every_preset_with_its_values():
    code, out, _ = xbm("presets", "--recipe", "paper")
    assert code == 0
    rows = rows_of(out)
    assert set(DATASETS) <= rows.keys()
    assert all(word in rows["cars"] for word in ("googlenet", "512", "0.0001", "1400", "2000", "backprop, α 0.1, m 0.9"))
    assert all(word in rows["inshop"] for word in ("0.0003", "24000", "34000", "0.2", "queue", "1000"))
    for word in ("contrastive", "triplet", "ms", "resnet50", "bn_inception", "official"):
        assert word in out


def test_one_preset_is_yaml_that_train_takes(tmp_path):
    code, out, _ = xbm("presets", "cars", "--loss", "ms", "--trunk", "resnet50", "--recipe", "official")
    assert code == 0
    assert from_dict(yaml.safe_load(out)) == preset("cars", "ms", "resnet50", "official")
    (tmp_path / "mine.yaml").write_text(out)
    assert load(tmp_path / "mine.yaml").model.dim == 128


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["carz"], "did you mean 'cars'"),
        (["--recipe", "x"], "unknown recipe"),
        (["cars", "--loss", "m"], "unknown loss"),
        (["cars", "--trunk", "x"], "unknown trunk"),
    ],
)
def test_unknown_names(words, message):
    code, _, err = xbm("presets", *words)
    assert code == 2 and message in err and err.count("\n") == 1
