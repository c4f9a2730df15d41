import pytest
import torch

pytest.importorskip("accelerate", reason="the integration with accelerate needs accelerate")

from tests.same import same
from tests.xbm.integrations import accelerate_run, small
from xbm import CrossBatchMemory, InputError
from xbm.integrations.accelerate import register


@pytest.mark.slow
def test_a_run_that_goes_on_in_another_process_ends_bit_for_bit_as_one_that_was_not_stopped(tmp_path):
    for phase in ("whole", "first"):
        accelerate_run.train(tmp_path, phase)
    small.run_module("accelerate_run", tmp_path, "rest")
    small.assert_same_end(tmp_path)


def test_with_one_process_the_accelerators_own_method_will_do(tmp_path):
    for phase in ("whole", "first", "rest"):
        accelerate_run.train(tmp_path, phase, "register_for_checkpointing")
    small.assert_same_end(tmp_path)


def test_what_is_not_registered_is_lost(tmp_path):
    """What these tests compare does depend on the memory."""
    for phase in ("whole", "first", "rest"):
        accelerate_run.train(tmp_path, phase, "nothing")
    with pytest.raises(AssertionError):
        small.assert_same_end(tmp_path)


class Recorder:
    """An accelerator that only takes notes."""

    device = torch.device("meta")

    def __init__(self):
        self.registered = []

    def register_for_checkpointing(self, *objects):
        self.registered += objects


def test_the_memory_goes_to_the_device():
    accelerator, memory = Recorder(), CrossBatchMemory(3, 2)
    register(accelerator, memory=memory)
    assert memory.rows.device.type == "meta" and len(accelerator.registered) == 1
    with pytest.raises(InputError, match="nothing to save"):
        register(accelerator)


@pytest.mark.slow
def test_with_two_processes_each_gets_its_own_memory_back(tmp_path):
    for phase in ("whole", "first", "rest"):
        small.run_module("accelerate_run", tmp_path, phase, processes=2)
    ends = [torch.load(tmp_path / f"whole{rank}.pt", weights_only=True) for rank in (0, 1)]
    for rank, end in enumerate(ends):
        assert same(end, torch.load(tmp_path / f"rest{rank}.pt", weights_only=True)) == []
    assert not torch.equal(ends[0]["memory"]["row_ids"], ends[1]["memory"]["row_ids"])
