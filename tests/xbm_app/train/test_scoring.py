import pytest

from tests.tiny import tiny_config
from xbm.errors import InputError
from xbm_app.train.loop import train
from xbm_app.train.scoring import evaluate_run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_scores_again_as_it_did_at_its_end(photos, tmp_path, precision):
    result = train(tiny_config(photos, optim__precision=precision), tmp_path / "run", quiet=True)
    again = evaluate_run(tmp_path / "run")
    assert again["protocols"].keys() == result["protocols"].keys() == {"test"}
    assert again["protocols"]["test"] == result["protocols"]["test"]  # on a CPU, to the last bit
    assert again["iterations"] == 17 and again["protocol"] == "test"


def test_held_out_classes_are_scored_where_some_were(photos, tmp_path):
    result = train(tiny_config(photos, data__holdout=0.4, batch__size=6, optim__iterations=2), tmp_path / "run", quiet=True)
    again = evaluate_run(tmp_path / "run" / "checkpoints" / "last.pt")
    assert again["protocol"] == "held-out" and again["queries"] == result["queries"] == 12
    assert again["recall@1"] == result["recall@1"]


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(InputError, match="holds no checkpoint"):
        evaluate_run(tmp_path)
