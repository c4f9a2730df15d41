"""What can go wrong in the middle of a run: the sentence, the exit code, and the checkpoint that survives."""

import errno
import os
import shutil
import subprocess

import pytest
import torch

from tests.tiny import differences, draw_photos, set_options, tiny_config, xbm
from xbm.errors import DivergedError, InputError
from xbm_app.files import read_checkpoint, write_checkpoint
from xbm_app.train import loop
from xbm_app.train import metrics as metrics_module
from xbm_app.train.loop import train


def last(run) -> dict:
    return read_checkpoint(run / "checkpoints" / "last.pt")


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device", "/some/file")


@pytest.mark.parametrize("where", ["checkpoint", "metrics", "tensorboard", "result"])
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_once_there_is_room(photos, tmp_path, monkeypatch, where):
    config = tiny_config(photos)
    train(config, tmp_path / "whole", quiet=True)
    count = 0

    def later(*given, **named):
        nonlocal count
        count += 1
        return full() if count == 2 else plain(*given, **named)

    with monkeypatch.context() as patch:
        if where == "checkpoint":
            plain = torch.save
            patch.setattr(torch, "save", later)
        elif where == "metrics":
            plain = metrics_module.Metrics.write
            patch.setattr(metrics_module.Metrics, "write", later)
        elif where == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            plain = SummaryWriter.add_scalar
            patch.setattr(SummaryWriter, "add_scalar", lambda *given: full() if given[-1] > 9 else plain(*given))
        else:
            from xbm_app.train import finish

            patch.setattr(finish, "write_json", full)
        with pytest.raises(
            InputError, match=r"could not write .* \(No space left on device\); the previous checkpoint"
        ) as error:
            train(config, tmp_path / "run", quiet=True)
    assert "\n" not in str(error.value) and "the previous checkpoint is intact" in str(error.value)
    assert last(tmp_path / "run")["step"] == {"checkpoint": 7, "metrics": 7, "tensorboard": 14, "result": 17}[where]
    train(config, tmp_path / "run", resume=True, quiet=True)
    assert differences(tmp_path / "whole", tmp_path / "run") == []


def test_a_disk_that_is_really_full_ends_in_exit_code_2(photos, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        train(tiny_config(photos, optim__iterations=7), disk / "run", quiet=True)
        with open(disk / "filler", "wb") as filler:
            filler.write(bytes(shutil.disk_usage(disk).free - 20_000))
        from xbm_app.train.config import save

        save(tiny_config(photos), disk / "run" / "config.yaml")  # a longer run
        code, _, said = xbm("train", "--resume", disk / "run", "--quiet")
        assert code == 2 and said.startswith("error: could not write ") and said.count("\n") == 1
        assert "No space left on device" in said and "the previous checkpoint is intact" in said
        assert last(disk / "run")["step"] == 7
        (disk / "filler").unlink()
        assert xbm("train", "--resume", disk / "run", "--quiet").code == 0
        assert last(disk / "run")["step"] == 17
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("how", ["cut short", "garbage"])
def test_an_unreadable_checkpoint_ends_in_exit_code_2(photos, tmp_path, how):
    run = tmp_path / "run"
    train(tiny_config(photos, optim__iterations=2), run, quiet=True)
    path = run / "checkpoints" / "last.pt"
    path.write_bytes(path.read_bytes()[:999] if how == "cut short" else b"garbage" * 99)
    for words in (("train", "--resume", run), ("evaluate", run), ("embed", run, photos)):
        code, _, said = xbm(*words)
        assert code == 2 and said.startswith(f"error: {path} is not a readable checkpoint") and said.count("\n") == 1


def test_a_checkpoint_with_code_in_it_does_not_run_it(photos, tmp_path):
    class Mischief:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    run = tmp_path / "run"
    train(tiny_config(photos, optim__iterations=2), run, quiet=True)
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    torch.save({**state, "model": Mischief()}, run / "checkpoints" / "last.pt")
    code, _, said = xbm("evaluate", run)
    assert code == 2 and "containing code" in said and not (tmp_path / "made").exists()


def test_an_image_that_vanishes_mid_run_is_named_and_the_run_goes_on_once_it_is_back(tmp_path, monkeypatch):
    photos = draw_photos(tmp_path / "photos")
    config = tiny_config(photos)
    train(config, tmp_path / "whole", quiet=True)
    write, hidden = write_checkpoint, photos.with_name("hidden")

    def then_hide(path, state):
        write(path, state)
        photos.rename(hidden)

    with monkeypatch.context() as patch:
        patch.setattr("xbm_app.train.state.write_checkpoint", then_hide)
        with pytest.raises(InputError, match=r"photos/class_\d\d/\d.png is missing: restore it"):
            train(config, tmp_path / "run", quiet=True)
    assert last(tmp_path / "run")["step"] == 7
    code, _, said = xbm("train", "--resume", tmp_path / "run", "--quiet")
    assert code == 2 and "is missing: restore it" in said and said.count("\n") == 1
    hidden.rename(photos)
    assert xbm("train", "--resume", tmp_path / "run", "--quiet").code == 0
    assert differences(tmp_path / "whole", tmp_path / "run") == []


SENTENCE = r"iteration \d+: the loss is not finite; {kept}: try a lower optim.lr"


def test_a_rate_that_is_too_high_is_told_and_the_last_good_checkpoint_kept(photos, tmp_path, monkeypatch):
    """The rate jumps after the first checkpoint; weights of 1e30 are finite still, what they embed is not."""
    from xbm_app.train.state import RunState

    def jump(run, step):
        for group in run.optimizer.param_groups:
            group["lr"] = 1e30 if step >= 9 else 1e-3

    monkeypatch.setattr(RunState, "set_learning_rate", jump)
    run = tmp_path / "run"
    with pytest.raises(DivergedError, match=SENTENCE.format(kept=f"the last good checkpoint is {run}/checkpoints/last.pt")):
        train(tiny_config(photos, optim__decay_at=(9,)), run, quiet=True)
    state = last(run)
    assert state["step"] == 7 and all(bool(value.isfinite().all()) for value in state["model"].values())


@pytest.mark.parametrize("memory", [True, False])
def test_a_loss_that_is_not_finite_stops_the_run_at_once(photos, tmp_path, monkeypatch, memory):
    from xbm.losses import ContrastiveLoss

    plain, calls = ContrastiveLoss.forward, 0

    def spoilt(loss, anchors, labels, bank=None, **rest):
        nonlocal calls
        value, stats = plain(loss, anchors, labels, bank, **rest)
        calls += 1
        return value * (float("nan") if calls > 11 and (bank is not None) is memory else 1), stats

    monkeypatch.setattr(ContrastiveLoss, "forward", spoilt)
    run = tmp_path / "run"
    config = tiny_config(photos, log__every=100, memory__ratio=1.0 if memory else 0.0)
    with pytest.raises(DivergedError, match=SENTENCE.format(kept="the last good checkpoint is .*")) as error:
        train(config, run, quiet=True)
    assert str(error.value).startswith(f"iteration {7 if memory else 11}:")  # where it was, not where it was noticed
    assert last(run)["step"] == 7


@pytest.mark.parametrize("part", [0, 1])
def test_no_part_of_an_accumulated_step_may_be_bad(photos, tmp_path, monkeypatch, part):
    from xbm.losses import ContrastiveLoss

    plain, calls = ContrastiveLoss.forward, 0

    def spoilt(*given, **named):
        nonlocal calls
        value, stats = plain(*given, **named)
        calls += 1
        return value * (float("inf") if calls == 14 + part + 1 else 1), stats

    monkeypatch.setattr(ContrastiveLoss, "forward", spoilt)
    config = tiny_config(photos, memory__ratio=0.0, batch__accumulate=2, log__checkpoint_every=1)
    with pytest.raises(DivergedError, match="iteration 7: the loss is not finite"):
        train(config, tmp_path / "run", quiet=True)
    assert last(tmp_path / "run")["step"] == 7


def test_a_gradient_that_is_not_finite_does_not_reach_the_checkpoint(photos, tmp_path, monkeypatch):
    """The loss of the iteration is fine; the weights that it leaves behind are not."""
    plain, done = loop.update_weights, 0

    def spoil(run):
        nonlocal done
        done += 1
        if done == 14:  # the last iteration before the second checkpoint
            run.model.head.weight.grad.fill_(float("nan"))
        plain(run)

    monkeypatch.setattr(loop, "update_weights", spoil)
    with pytest.raises(DivergedError, match="iteration 13: the loss is not finite; the last good checkpoint is"):
        train(tiny_config(photos), tmp_path / "run", quiet=True)
    assert last(tmp_path / "run")["step"] == 7


def test_a_loss_that_is_not_finite_ends_in_exit_code_2(photos, tmp_path):
    words = ["train", "--data", photos, "--trunk", "small", "--quiet", "--out", tmp_path / "run", "--no-memory"]
    code, _, said = xbm(*words, *set_options(optim__lr=1e17))
    assert code == 2 and "the loss is not finite; no checkpoint had been written yet: try a lower optim.lr" in said
    assert said.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_sentence(photos, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(InputError, match=r"could not write .*run"):
        train(tiny_config(photos), tmp_path / "run", quiet=True)
