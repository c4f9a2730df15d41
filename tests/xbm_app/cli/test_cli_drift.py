import json

from tests.tiny import tiny_config, xbm
from xbm_app.train.loop import train


def test_the_drift_of_a_finished_run(own_photos, tmp_path):
    train(tiny_config(own_photos, optim__iterations=22), tmp_path / "run", quiet=True)
    code, out, err = xbm("drift", tmp_path / "run", "--out", tmp_path / "d.svg", "--json", tmp_path / "d.json")
    assert code == 0, err
    assert "Δt" in out and out.splitlines()[-1] == str(tmp_path / "d.svg") and (tmp_path / "d.svg").exists()
    (curves,) = json.loads((tmp_path / "d.json").read_text()).values()
    assert curves["10"]["step"] and all(value > 0 for value in curves["10"]["drift"])


def test_a_folder_without_a_run(tmp_path):
    code, _, err = xbm("drift", tmp_path)
    assert code == 2 and "does not exist" in err


def test_the_figure_is_an_svg(tmp_path):
    code, _, err = xbm("drift", tmp_path, "--out", tmp_path / "d.png")
    assert code == 2 and "d.png must end in .svg" in err
