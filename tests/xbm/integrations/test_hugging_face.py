import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the integration with Hugging Face needs transformers and accelerate")
pytest.importorskip("accelerate", reason="the integration with Hugging Face needs transformers and accelerate")

from safetensors.torch import load_file

from tests.same import same
from tests.xbm.integrations import hugging_face_run, small
from xbm import CrossBatchMemory, InputError
from xbm.integrations import hugging_face
from xbm.integrations.hugging_face import FILE, MemoryCallback


@pytest.mark.slow
def test_a_run_that_goes_on_in_another_process_ends_bit_for_bit_as_one_that_was_not_stopped(tmp_path):
    for phase in ("whole", "first"):
        hugging_face_run.train(tmp_path, phase)
    assert sorted(path.parent.name for path in (tmp_path / "parts").glob(f"*/{FILE}")) == ["checkpoint-3", "checkpoint-6"]
    small.run_module("hugging_face_run", tmp_path, "rest")
    small.assert_same_end(tmp_path)


@pytest.fixture
def halves(tmp_path):
    """A whole run, and the first half of another."""
    for phase in ("whole", "first"):
        hugging_face_run.train(tmp_path, phase)
    return tmp_path


def test_without_the_memory_the_run_ends_elsewhere(halves, monkeypatch):
    monkeypatch.setattr(MemoryCallback, "on_train_begin", lambda *_, **__: None)
    hugging_face_run.train(halves, "rest")
    with pytest.raises(AssertionError):
        small.assert_same_end(halves)


def test_an_older_checkpoint_is_resumed_with_its_own_memory(halves):
    hugging_face_run.train(halves, "rest", resume=str(halves / "parts" / "checkpoint-3"))
    small.assert_same_end(halves)


@pytest.mark.slow
def test_a_checkpoint_elsewhere_is_found_where_it_is_named(halves):
    elsewhere = halves / "kept" / "best"
    shutil.copytree(halves / "parts" / "checkpoint-6", elsewhere)
    with pytest.raises(InputError, match=rf"resumes at step 6, but .*holds no xbm_memory\.pt of that step.*{FILE}"):
        hugging_face_run.train(halves, "rest", resume=str(elsewhere), output="new")
    hugging_face_run.train(
        halves, "rest", lambda bank: MemoryCallback(elsewhere, memory=bank), resume=str(elsewhere), output="new"
    )
    small.assert_same_end(halves)


@pytest.mark.slow
def test_a_checkpoint_named_in_the_arguments_is_found(halves, monkeypatch):
    elsewhere = halves / "kept"
    shutil.copytree(halves / "parts" / "checkpoint-6", elsewhere)
    monkeypatch.setattr(hugging_face_run.TrainingArguments, "resume_from_checkpoint", str(elsewhere), raising=False)
    original = hugging_face_run.TrainingArguments

    def with_name(*args, **kwargs):
        return original(*args, **kwargs, resume_from_checkpoint=str(elsewhere))

    monkeypatch.setattr(hugging_face_run, "TrainingArguments", with_name)
    hugging_face_run.train(halves, "rest", resume=str(elsewhere), output="new")
    small.assert_same_end(halves)


def test_a_checkpoint_that_was_cut_off_before_its_memory_is_refused(halves):
    (halves / "parts" / "checkpoint-6" / FILE).unlink()
    with pytest.raises(InputError, match=r"resumes at step 6, but .*checkpoint-6 holds no xbm_memory\.pt") as caught:
        hugging_face_run.train(halves, "rest")
    assert "\n" not in str(caught.value)


def test_the_memory_of_another_step_is_not_taken(halves):
    shutil.copy(halves / "parts" / "checkpoint-3" / FILE, halves / "parts" / "checkpoint-6" / FILE)
    with pytest.raises(InputError, match=r"holds no xbm_memory\.pt of that step"):
        hugging_face_run.train(halves, "rest")
    with pytest.raises(InputError, match=r"resumes at step 0, but .*checkpoint-3 holds no xbm_memory\.pt of that step"):
        hugging_face_run.train(halves, "whole", lambda bank: MemoryCallback(halves / "parts" / "checkpoint-3", memory=bank))


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / FILE
    hugging_face._write({"step": 1}, path)

    def half(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        hugging_face._write({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1} and [each.name for each in tmp_path.iterdir()] == [FILE]


class Arguments:
    device, should_save, resume_from_checkpoint = "meta", True, None

    def __init__(self, output_dir):
        self.output_dir = str(output_dir)


class State:
    global_step, is_hyper_param_search = 7, True


def test_the_folder_of_a_trial_is_found(tmp_path):
    (tmp_path / "checkpoint-7").mkdir()  # of an earlier run
    (tmp_path / "run-0" / "checkpoint-7").mkdir(parents=True)
    MemoryCallback(memory=CrossBatchMemory(3, 2)).on_save(Arguments(tmp_path), State, None)
    assert [path.parent for path in tmp_path.rglob(FILE)] == [tmp_path / "run-0" / "checkpoint-7"]
    shutil.rmtree(tmp_path / "run-0")
    with pytest.raises(InputError, match="there is no folder checkpoint-7 in"):
        MemoryCallback(memory=CrossBatchMemory(3, 2)).on_save(Arguments(tmp_path), State, None)


def test_only_a_process_that_saves_writes_and_the_memory_goes_to_the_device(tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    arguments, state = Arguments(tmp_path), State()
    arguments.should_save, state.is_hyper_param_search = False, False
    memory = CrossBatchMemory(3, 2)
    MemoryCallback(memory=memory).on_save(arguments, state, None)
    assert not list(tmp_path.rglob(FILE))
    state.global_step = 0
    MemoryCallback(memory=memory).on_train_begin(arguments, state, None)
    assert memory.rows.device.type == "meta"


def test_a_memory_is_passed_by_name():
    with pytest.raises(InputError, match=r"pass a memory by name, such as MemoryCallback\(memory=memory\)"):
        MemoryCallback(CrossBatchMemory(3, 2))
    with pytest.raises(InputError, match="nothing to save"):
        MemoryCallback()


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "xbm.integrations.hugging_face")
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("xbm.integrations.hugging_face")
    assert str(caught.value) == "xbm.integrations.hugging_face needs transformers: pip install transformers"


def test_the_two_towers_of_the_page_train_and_resume_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[3] / "docs" / "integrations.md"
    (block,) = re.findall(r"^```python\n(import torch\n.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names: dict = {"__name__": "page"}
    exec(compile(block, str(page), "exec"), names)
    whole = load_file("two-towers/checkpoint-4/model.safetensors")
    shutil.rmtree("two-towers/checkpoint-4")
    model = names["TwoTowers"]()
    names["Trainer"](model, names["arguments"], train_dataset=names["rows"]).train(resume_from_checkpoint=True)
    assert same(whole, dict(model.state_dict())) == []
    assert len(model.criterion.queries) == 4 * 8 and float(model.criterion.loss.temperature) != pytest.approx(0.07, abs=1e-7)
