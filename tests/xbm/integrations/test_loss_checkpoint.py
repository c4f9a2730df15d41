"""LossCheckpoint by itself; in a trainer: test_in_sentence_transformers.py."""

import shutil

import pytest
import torch

pytest.importorskip("transformers", reason="the integration with Hugging Face needs transformers")

from transformers import TrainerState

from xbm import CrossBatchMemory, InputError, SupConLoss, TwoTowerLoss
from xbm.integrations.hugging_face import FILE, MemoryCallback
from xbm.integrations.loss_checkpoint import LossCheckpoint


class Arguments:
    device, should_save, save_only_model, resume_from_checkpoint = "cpu", True, False, None

    def __init__(self, output_dir):
        self.output_dir = str(output_dir)


def filled(seed, size=6):
    loss, draw = TwoTowerLoss(SupConLoss(0.1), size, 4), torch.Generator().manual_seed(seed)
    loss(*(torch.nn.functional.normalize(torch.randn(3, 4, generator=draw)) for _ in range(2)))
    return loss


def at(step):
    return TrainerState(global_step=step)


def rows_of(loss):
    return loss.queries.embeddings


@pytest.fixture
def saved(tmp_path):
    """Arguments of a run with a checkpoint of the loss `filled(0)` at step 7."""
    (tmp_path / "checkpoint-7").mkdir()
    LossCheckpoint(filled(0)).on_save(Arguments(tmp_path), at(7), None)
    return Arguments(tmp_path)


def resume(arguments, step=7, loss=None):
    loss = loss or filled(1)
    LossCheckpoint(loss).on_train_begin(arguments, at(step), None)
    return loss


def test_it_comes_back_at_its_step(saved):
    assert torch.equal(rows_of(resume(saved)), rows_of(filled(0)))
    assert torch.equal(rows_of(resume(saved, step=0)), rows_of(filled(1)))  # training begins: nothing to restore


def test_the_file_of_another_step_is_not_taken(saved, tmp_path):
    shutil.copytree(tmp_path / "checkpoint-7", tmp_path / "checkpoint-9")
    with pytest.raises(InputError, match=r"resumes at step 9, but .*checkpoint-9 holds no loss\.pt of that step: set resume_"):
        resume(saved, step=9)
    named = Arguments(tmp_path / "elsewhere")
    named.resume_from_checkpoint = str(tmp_path / "checkpoint-9")
    assert torch.equal(rows_of(resume(named)), rows_of(filled(0)))


def test_a_state_that_does_not_fit_is_one_sentence(saved):
    for loss in (filled(1, size=5), torch.nn.Linear(2, 2)):
        with pytest.raises(
            InputError, match=r"the state of the loss in the checkpoint does not fit it.*: build it as"
        ) as caught:
            resume(saved, loss=loss)
        assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_folder_is_refused_not_skipped(tmp_path):
    arguments = Arguments(tmp_path)
    with pytest.raises(InputError, match=r"there is no folder checkpoint-7 in .* to save loss\.pt in"):
        LossCheckpoint(filled(0)).on_save(arguments, at(7), None)
    for name, value in (("should_save", False), ("save_only_model", True)):
        other = Arguments(tmp_path)
        setattr(other, name, value)
        LossCheckpoint(filled(0)).on_save(other, at(7), None)
    assert not [*tmp_path.iterdir()]


def test_the_folder_of_a_trial_is_found(tmp_path):
    (tmp_path / "run-0" / "checkpoint-7").mkdir(parents=True)
    state = at(7)
    state.is_hyper_param_search = True
    LossCheckpoint(filled(0)).on_save(Arguments(tmp_path), state, None)
    assert [path.name for path in (tmp_path / "run-0" / "checkpoint-7").iterdir()] == ["loss.pt"]


def test_two_losses_in_one_file_are_refused_when_training_begins(tmp_path):
    arguments, first, second = Arguments(tmp_path), filled(0), filled(1)
    for _ in range(2):  # the second training of the same trainer has a state of its own
        state = at(0)
        LossCheckpoint(first).on_train_begin(arguments, state, None)
        LossCheckpoint(first).on_train_begin(arguments, state, None)  # twice the same is one
        LossCheckpoint(second, "second.pt").on_train_begin(arguments, state, None)
        with pytest.raises(
            InputError, match=r'same loss\.pt .*pass LossCheckpoint\(loss, "a\.pt"\) of xbm\.\S+ for each'
        ) as caught:
            LossCheckpoint(second).on_train_begin(arguments, state, None)
        assert "\n" not in str(caught.value)
        state.save_to_json(str(tmp_path / "state.json"))


def test_two_memory_callbacks_are_refused_too(tmp_path):
    arguments, state = Arguments(tmp_path), at(0)
    one, other = (MemoryCallback(memory=CrossBatchMemory(3, 2)) for _ in range(2))
    one.on_train_begin(arguments, state, None)
    with pytest.raises(InputError, match=rf"write the same {FILE} .*: pass all memories to one MemoryCallback"):
        other.on_train_begin(arguments, state, None)


@pytest.mark.parametrize("file", ["", "folder/loss.pt", None, ".."])
def test_the_file_is_a_name(file):
    with pytest.raises(InputError, match=r'name of a file .*such as "a\.pt", got '):
        LossCheckpoint(filled(0), file)
