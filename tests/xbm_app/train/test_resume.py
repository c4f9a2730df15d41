"""A run that is stopped anywhere, as often as you like, ends as if nothing had happened."""

import random
import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny import differences, draw_photos, tiny_config, xbm
from tests.xbm_app.train.interrupted import Killed, ended, ended_in_checkpoint
from xbm.errors import DamagedFileError, InputError
from xbm_app.files import locked, read_checkpoint, write_checkpoint
from xbm_app.train import state
from xbm_app.train.config import override
from xbm_app.train.dataset import read_run
from xbm_app.train.label_errors import IGNORED
from xbm_app.train.loop import train
from xbm_app.train.metrics import read_metrics
from xbm_app.train.state import Hooks

CASES = {
    "queue": {},
    "moving_average": {"memory__update": "moving_average", "memory__momentum": 0.7},
    "backprop": {"memory__update": "backprop", "memory__alpha": 0.3, "memory__momentum": 0.5},
    "doubt": {"memory__update": "moving_average", "memory__doubt": "skip", "data__noise": 0.2},
    "doubt, rows that descend": {"memory__update": "backprop", "memory__doubt": "skip", "data__noise": 0.2},
    "updates_per_step": {"memory__updates_per_step": 2, "memory__ratio": 0.7, "memory__keys": 0.9},
    "accumulate": {"batch__accumulate": 2, "memory__batch_weight": 0.0},
    "plateau": {
        "optim__schedule": "plateau", "data__holdout": 0.4, "log__evaluate_every": 1, "log__every": 1, "batch__size": 6,
        "optim__lr": 1e-6, "memory__fill": False, "memory__size": 23, "model__head_init": "kaiming",
    },
    "held_out": {"data__holdout": 0.4, "log__evaluate_every": 3, "batch__size": 6, "loss__name": "triplet"},
    "proxies": {"memory__ratio": 0.0, "loss__name": "pml/ProxyAnchorLoss", "loss__options": {"alpha": 16}},
    "proxies, scored on the way": {
        "memory__ratio": 0.0, "loss__name": "pml/SoftTripleLoss", "loss__options": {"centers_per_class": 2},
        "loss__lr_factor": 10.0, "data__holdout": 0.4, "log__evaluate_every": 3, "batch__size": 6,
    },
    "a loss that learns on a memory": {
        "loss__name": "pml/MarginLoss", "loss__options": {"learn_beta": True, "nu": 0.1, "num_classes": 6},
        "memory__batch_weight": 1.0,
    },
    "a loss with a histogram": {"loss__name": "pml/DynamicSoftMarginLoss", "memory__batch_weight": 1.0},
    "adamw, warm-up, cosine, clipped, averaged": {
        "optim__name": "adamw", "optim__warmup": 5, "optim__schedule": "cosine", "optim__clip": 0.5, "optim__ema": 0.9,
        "data__holdout": 0.4, "log__evaluate_every": 3, "batch__size": 6,
    },
    "sgd, linear, layer by layer": {"optim__name": "sgd", "optim__schedule": "linear", "optim__layer_decay": 0.5},
    "frozen trunk, averaged": {"model__freeze": "trunk", "optim__ema": 0.9, "memory__update": "moving_average"},
    "frozen blocks": {"model__freeze": "blocks:2"},
    "in chunks": {"batch__chunk": 3, "model__freeze_batch_norm": True, "batch__accumulate": 2},
    "no_memory": {"memory__ratio": 0.0, "loss__name": "multi_similarity", "model__freeze_batch_norm": True},
}  # fmt: skip
LEARNED = {
    "proxies": "proxies", "proxies, scored on the way": "fc", "a loss that learns on a memory": "beta",
    "a loss with a histogram": "hist_",
}  # cases by what their loss keeps  # fmt: skip
LINES = 4000  # fewer than any of these runs takes from beginning to end


def die() -> None:
    raise Killed


def stop_and_go(config, folder, kills: int, seed: int) -> int:
    """Trains with a stop at random places; returns how often it was stopped."""
    draw, stopped = random.Random(seed), 0
    for _ in range(kills):
        try:
            with ended(draw, LINES, die):
                train(config, folder, resume=(folder / "config.yaml").exists(), quiet=True)
        except Killed:
            stopped += 1
    train(config, folder, resume=(folder / "config.yaml").exists(), quiet=True)
    return stopped


@pytest.fixture
def doubting(monkeypatch):
    """Labels are looked at early and whatever the embeddings tell: there are rows set aside within a short run."""
    monkeypatch.setattr("xbm_app.train.state.CHECK_STEPS", 3)
    monkeypatch.setattr("xbm_app.train.label_errors.MOST", 1.0)


@pytest.mark.parametrize("case", CASES)
def test_a_run_stopped_at_random_lines_ends_bit_for_bit_as_one_that_was_not(photos, tmp_path, doubting, case):
    config = tiny_config(photos, **CASES[case])
    train(config, tmp_path / "whole", quiet=True)
    stopped = stop_and_go(config, tmp_path / "stopped", kills=4, seed=len(case))
    assert stopped >= 2
    assert differences(tmp_path / "whole", tmp_path / "stopped") == []


def test_a_slow_run_saves_by_the_clock_and_continues_there(photos, tmp_path, monkeypatch, capsys):
    config = tiny_config(photos, log__checkpoint_every=1000, log__every=1)
    train(config, tmp_path / "whole", quiet=True)

    def stop_after(rows, folder):
        def on_log(row):
            if row["step"] >= rows:
                raise Killed

        with pytest.raises(Killed):
            train(config, folder, quiet=True, hooks=Hooks(on_log=on_log))

    stop_after(2, tmp_path / "fast")
    assert not (tmp_path / "fast" / "checkpoints" / "last.pt").exists()
    capsys.readouterr()
    train(config, tmp_path / "fast", resume=True)
    assert "starting at the first iteration" in capsys.readouterr().err
    monkeypatch.setattr("xbm_app.train.loop.CHECKPOINT_SECONDS", 0)
    stop_after(2, tmp_path / "slow")
    assert (tmp_path / "slow" / "checkpoints" / "last.pt").exists()
    train(config, tmp_path / "slow", resume=True, quiet=True)
    for folder in ("fast", "slow"):
        assert differences(tmp_path / "whole", tmp_path / folder) == []


def test_the_doubt_of_these_tests_sets_rows_aside(photos, tmp_path, doubting):
    config = tiny_config(photos, **CASES["doubt"])
    train(config, tmp_path / "run", quiet=True)
    stamps = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["memory"]["stamps"]
    assert 0 < (stamps == IGNORED).sum() < len(stamps)


def test_the_losses_of_these_tests_learn(photos, tmp_path):
    """Their parameters and buffers are in the checkpoint, and move."""
    for case, name in LEARNED.items():
        config = tiny_config(photos, **CASES[case])
        states = []
        for iterations in (7, 14):
            train(override(config, {"optim.iterations": iterations}), tmp_path / f"{name} {iterations}", quiet=True)
            state = read_checkpoint(tmp_path / f"{name} {iterations}" / "checkpoints" / "last.pt")
            states.append(state["loss"][f"loss.loss.{name}"])
            assert [group["name"] for group in state["optimizer"]["param_groups"]].count("loss") == (name != "hist_")
        assert not torch.equal(*states)


def test_the_plateau_of_these_tests_is_met_within_the_run(photos, tmp_path):
    config = tiny_config(photos, **CASES["plateau"])
    train(config, tmp_path / "run", quiet=True)
    rates = [row["lr"] for row in read_metrics(tmp_path / "run" / "metrics.csv")]
    assert rates[0] == 1e-6 and rates[-1] < 2e-7


@pytest.mark.parametrize("case", ["queue", "backprop", *(case for case in LEARNED if "scored" not in case)])
def test_a_run_stopped_in_the_middle_of_a_checkpoint_goes_on_from_the_one_before(photos, tmp_path, case):
    config = tiny_config(photos, **CASES[case])
    train(config, tmp_path / "whole", quiet=True)
    with pytest.raises(Killed), ended_in_checkpoint(3, die):
        train(config, tmp_path / "run", quiet=True)
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["step"] == 14
    assert read_metrics(tmp_path / "run" / "metrics.csv")[-1]["step"] == 16
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def test_a_run_stopped_before_its_first_checkpoint_begins_again(photos, tmp_path):
    config = tiny_config(photos)
    train(config, tmp_path / "whole", quiet=True)
    with pytest.raises(Killed), ended_in_checkpoint(1, die):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "checkpoints" / "last.pt").exists()
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def test_resuming_a_finished_run_changes_nothing(photos, tmp_path):
    config = tiny_config(photos)
    train(config, tmp_path / "once", quiet=True)
    took = train(config, tmp_path / "twice", quiet=True)["seconds_per_iteration"]
    assert took > 0
    assert train(config, tmp_path / "twice", resume=True, quiet=True)["seconds_per_iteration"] == took
    assert differences(tmp_path / "once", tmp_path / "twice") == []


def test_random_numbers_drawn_by_the_model_go_on_where_they_stopped(photos, tmp_path, monkeypatch):
    plain = state.model_of

    def with_dropout(config):
        model = plain(config)
        model.trunk = torch.nn.Sequential(model.trunk, torch.nn.Dropout(0.4))
        return model

    monkeypatch.setattr(state, "model_of", with_dropout)
    config = tiny_config(photos)
    train(config, tmp_path / "whole", quiet=True)
    with pytest.raises(Killed), ended_in_checkpoint(2, die):
        train(config, tmp_path / "run", quiet=True)
    torch.manual_seed(99)
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def test_seeds_differ(photos, tmp_path):
    """What these tests compare does depend on what they vary."""
    train(tiny_config(photos), tmp_path / "one", quiet=True)
    train(tiny_config(photos, seed=1), tmp_path / "other", quiet=True)
    assert {"metrics.csv", "last.pt/memory/rows", "last.pt/model/head.weight"} <= set(
        differences(tmp_path / "one", tmp_path / "other")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim__lr": 1e-2}, "optim.lr was 0.001 in this run and is 0.01 now"),
        ({"memory__ratio": 0.5}, "memory.ratio was 1.0 in this run and is 0.5 now"),
        ({"data__holdout": 0.4}, "trained on 36 images of 6 classes"),
    ],
)
def test_a_run_is_not_resumed_as_another_one(photos, tmp_path, change, message):
    train(tiny_config(photos), tmp_path, quiet=True)
    with pytest.raises(InputError, match=message):
        train(tiny_config(photos, **change), tmp_path, resume=True, quiet=True)


def test_a_finished_run_can_be_made_longer(photos, tmp_path):
    train(tiny_config(photos, optim__iterations=7), tmp_path / "run", quiet=True)
    result = train(tiny_config(photos), tmp_path / "run", resume=True, quiet=True)
    assert result["iterations"] == 17 and read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["step"] == 17


def replace_pixels(photos, run):
    for path in photos.rglob("*.png"):
        size = path.stat().st_size
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path, compress_level=0)
        assert path.stat().st_size == size


def change_the_split(photos, run):
    split = run / "split.csv"
    split.write_text(split.read_text().replace("class_00", "class_0X").replace("class_01", "class_00"))


def change_the_split_and_delete_the_checksums(photos, run):
    lines = (run / "split.csv").read_text().splitlines()
    lines[1], lines[2] = lines[2], lines[1]
    (run / "split.csv").write_text("\n".join(lines))
    (run / "checksums.json").unlink()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", [replace_pixels, change_the_split, change_the_split_and_delete_the_checksums])
def test_other_data_than_the_run_began_with_is_refused(photos, tmp_path, change):
    run, own = tmp_path / "run", shutil.copytree(photos, tmp_path / "photos")
    for path in own.rglob("*.png"):
        Image.open(path).save(path, compress_level=0)  # all of one size
    config = tiny_config(own, optim__iterations=7)
    train(config, run, quiet=True)
    longer = override(config, {"optim.iterations": 8})
    change(own, run)
    with pytest.raises(InputError, match=r"not as xbm wrote it|not those that this run began with"):
        train(longer, run, resume=True, quiet=True)


def test_a_copy_of_the_data_with_other_times_is_the_same_data(photos, tmp_path):
    run, own = tmp_path / "run", shutil.copytree(photos, tmp_path / "photos", copy_function=shutil.copyfile)
    train(tiny_config(photos, optim__iterations=7), run, quiet=True)
    with pytest.warns(UserWarning, match="other modification times"):
        train(tiny_config(own, optim__iterations=8), run, resume=True, quiet=True)


def test_replaced_images_outside_the_sample_are_noticed_by_their_times(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("xbm_app.train.dataset.SAMPLED", 1)
    run, own = tmp_path / "run", shutil.copytree(photos, tmp_path / "photos")
    config = tiny_config(own, optim__iterations=7)
    train(config, run, quiet=True)
    second = own / read_run(config, run).train.paths[1]
    size = second.stat().st_size
    Image.new("RGB", (16, 16)).save(second)
    second.write_bytes(second.read_bytes().ljust(size, b"\0"))
    assert second.stat().st_size == size
    with pytest.warns(UserWarning, match="other modification times"):
        train(override(config, {"optim.iterations": 8}), run, resume=True, quiet=True)


def test_replaced_pixels_of_a_store_are_refused_wherever_they_are(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("xbm_app.train.dataset.SAMPLED", 1)
    run, own, store = tmp_path / "run", shutil.copytree(photos, tmp_path / "photos"), tmp_path / "store"
    assert xbm("prepare", own, "--out", store, "--resize", 16).code == 0
    config = tiny_config(own, optim__iterations=7, data__root=None, data__store=str(store))
    train(config, run, quiet=True)
    replaced = own / read_run(config, run).train.paths[1]
    Image.fromarray(255 - np.asarray(Image.open(replaced))).save(replaced)
    assert xbm("prepare", own, "--out", store, "--resize", 16).code == 0
    with pytest.raises(InputError, match="not those that this run began with"):
        train(override(config, {"optim.iterations": 8}), run, resume=True, quiet=True)


def test_a_run_of_an_older_version_is_resumed_with_one_warning(photos, tmp_path):
    run = tmp_path / "run"
    train(tiny_config(photos, optim__iterations=7), run, quiet=True)
    (run / "checksums.json").unlink()
    last = run / "checkpoints" / "last.pt"
    write_checkpoint(last, {name: value for name, value in read_checkpoint(last).items() if name not in ("format", "data")})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        train(tiny_config(photos, optim__iterations=8), run, resume=True, quiet=True)
    assert [str(each.message).partition(" has files")[0] for each in told if "checksums" in str(each.message)] == [str(run)]
    (run / "metrics.csv").write_text("step\n1\n")
    with pytest.raises(DamagedFileError):  # from now on
        read_metrics(run / "metrics.csv")


def test_a_second_start_in_one_folder_changes_nothing(photos, tmp_path):
    other = draw_photos(tmp_path / "other", classes=5)
    with locked(tmp_path / "run"):
        (tmp_path / "run" / "split.csv").write_text("of the first")
        with pytest.raises(InputError, match="is being trained by another process"):
            train(tiny_config(other), tmp_path / "run", quiet=True)
        assert (tmp_path / "run" / "split.csv").read_text() == "of the first"
