import importlib
import sys

import pytest
import torch

pytest.importorskip("lightning", reason="the integration with lightning needs lightning")

from tests.same import same
from tests.xbm.integrations import lightning_run, small
from xbm import CrossBatchMemory, InputError
from xbm.integrations.lightning import MemoryCallback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.slow
def test_a_run_that_goes_on_in_another_process_ends_bit_for_bit_as_one_that_was_not_stopped(tmp_path):
    for phase in ("whole", "first"):
        lightning_run.train(tmp_path, phase)
    small.run_module("lightning_run", tmp_path, "rest")
    small.assert_same_end(tmp_path)
    checkpoint = torch.load(tmp_path / "first" / "epoch=1.ckpt", weights_only=True)
    assert "memory" in checkpoint["callbacks"]["MemoryCallback"] and not [k for k in checkpoint["state_dict"] if "rows" in k]


def test_without_the_callback_the_run_ends_elsewhere(tmp_path, monkeypatch):
    """What the test above compares does depend on the memory."""
    for phase in ("whole", "first"):
        lightning_run.train(tmp_path, phase)
    monkeypatch.setattr(MemoryCallback, "load_state_dict", lambda *_: None)
    lightning_run.train(tmp_path, "rest")
    with pytest.raises(AssertionError):
        small.assert_same_end(tmp_path)


def test_a_memory_of_another_size_is_refused(tmp_path, monkeypatch):
    lightning_run.train(tmp_path, "first")
    monkeypatch.setattr(small, "SIZE", 30)
    with pytest.raises(InputError, match="the state of memory in the checkpoint does not fit it"):
        lightning_run.train(tmp_path, "rest")


def test_a_memory_goes_where_the_module_is():
    memory = CrossBatchMemory(3, 2)
    module = torch.nn.Linear(2, 2)
    module.device, module.bank = torch.device("meta"), None
    module.__dict__["bank"] = memory
    for callback in (MemoryCallback(memory=memory), MemoryCallback("bank")):
        memory.to_empty(device="cpu")
        callback.setup(None, module, "fit")
        callback.on_fit_start(None, module)
        assert memory.rows.device.type == "meta"


def test_names_and_objects_are_told_apart():
    with pytest.raises(InputError, match=r"pass a memory by name, such as MemoryCallback\(memory=memory\)"):
        MemoryCallback(CrossBatchMemory(3, 2))
    with pytest.raises(InputError, match="nothing to save"):
        MemoryCallback()
    callback = MemoryCallback("memry")
    callback.setup(None, torch.nn.Linear(2, 2), "fit")
    with pytest.raises(InputError, match="Linear has no attribute 'memry': create it in __init__ or setup"):
        callback.state_dict()


@pytest.fixture
def without_lightning(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    for name in ("lightning.pytorch", "xbm.integrations.lightning"):
        monkeypatch.delitem(sys.modules, name)


def test_under_its_older_name_the_package_will_do(without_lightning):
    older = pytest.importorskip("pytorch_lightning")
    assert issubclass(importlib.import_module("xbm.integrations.lightning").MemoryCallback, older.Callback)


def test_a_missing_package_is_one_sentence(without_lightning, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("xbm.integrations.lightning")
    assert str(caught.value) == "xbm.integrations.lightning needs lightning: pip install lightning"


@pytest.mark.slow
def test_with_two_processes_each_gets_its_own_memory_back_and_its_shard(tmp_path):
    for phase in ("whole", "first", "rest"):
        small.run_module("lightning_run", tmp_path, phase, processes=2)
    ends = [torch.load(tmp_path / f"whole{rank}.pt", weights_only=True) for rank in (0, 1)]
    for rank, end in enumerate(ends):
        assert same(end, torch.load(tmp_path / f"rest{rank}.pt", weights_only=True)) == []
    assert not torch.equal(ends[0]["memory"]["row_ids"], ends[1]["memory"]["row_ids"])
