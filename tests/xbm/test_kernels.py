"""Where kernels run, and how they start: the first call compiles, the next ones go straight to what was compiled."""

import re
import sys
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from xbm import ContrastiveLoss, InputError, kernels
from xbm.engine import streaming

GPU = torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch):
    """A recent NVIDIA GPU and a Triton for it, whatever this machine has."""
    ampere = SimpleNamespace(name="A100", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ampere)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(kernels, "TRITON", (3, 6))
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    kernels._can_run.cache_clear()
    kernels._warn.cache_clear()
    yield ampere
    kernels._can_run.cache_clear()
    kernels._warn.cache_clear()


@pytest.mark.usefixtures("gpu")
def test_a_recent_nvidia_gpu_has_kernels_and_a_cpu_has_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.has_kernels(GPU)
        assert not kernels.has_kernels(torch.device("cpu")) and not kernels.has_kernels(torch.device("mps"))


@pytest.mark.parametrize(
    ("change", "lack"),
    [
        ({"TRITON": None, "HAS_TRITON": False}, r"Triton 3\.6 or later \(installed: none\)"),
        ({"TRITON": (3, 2), "HAS_TRITON": False}, r"Triton 3\.6 or later \(installed: 3\.2\)"),
        ({"hip": "6.4"}, r"an NVIDIA GPU \(this torch is built for ROCm\)"),
        ({"major": 7, "minor": 5}, r"compute capability 8\.0 or later \(A100 has 7\.5\)"),
    ],
)
def test_a_gpu_without_kernels_warns_once(gpu, monkeypatch, change, lack):
    for name, value in change.items():
        monkeypatch.setattr(torch.version if name == "hip" else gpu if name in ("major", "minor") else kernels, name, value)
    with pytest.warns(UserWarning, match=lack) as caught:
        answers = [kernels.has_kernels(torch.device("cuda", index)) for index in (0, 1, 0)]
    assert answers == [False] * 3 and len(caught) == 1
    assert re.search(lack, kernels.lacks(GPU))  # which engine="triton" quotes
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not kernels.has_kernels(GPU)


def test_the_version_of_triton_is_read_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert kernels.find_triton() is None
    (tmp_path / "triton").mkdir()  # such as the folder with the tests of the engine of that name
    assert kernels.find_triton() is None
    (tmp_path / "triton" / "__init__.py").write_text('"""isort:skip_file"""\n__version__ = \'3.12.1\'\nraise ImportError\n')
    sys.path_importer_cache.clear()
    assert kernels.find_triton() == (3, 12) >= kernels.OLDEST_TRITON


def test_no_folder_of_tests_can_be_imported_as_triton():
    """tests/xbm/engine on the path would make one of tests/xbm/engine/triton: `--import-mode=importlib` keeps it off."""
    spec = find_spec("triton")
    assert spec is None or spec.origin is not None


def test_without_a_gpu_the_engine_is_refused_and_auto_streams():
    v, labels = F.normalize(torch.randn(3, 8)), torch.arange(3)
    with pytest.raises(InputError, match=r'needs an NVIDIA GPU \(this is cpu\): use engine="auto"'):
        ContrastiveLoss(engine="triton")(v, labels)
    assert ContrastiveLoss()._choose_engine(v, None, None) is streaming


class Jitted:
    """What Triton's decorator returns, as far as starting goes."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getitem__(self, grid):
        def start(*arguments, **options):
            self.calls.append((grid, arguments, options))
            return Ready(self.calls)

        return start


class Launcher:
    """Triton's, as far as it is used: the last arguments of `launch` are the kernel's."""

    launch_cooperative_grid, launch_pdl, global_scratch_size, profile_scratch_size = False, False, 0, 0

    def __init__(self, calls) -> None:
        self.launch = lambda *given: calls.append(("directly", given[:3], given[13:]))


class Ready:
    function, packed_metadata = 12, (8, 1, 0)

    def __init__(self, calls) -> None:
        self.calls, self.run = calls, Launcher(calls)

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("plainly", grid, arguments))


class Driver:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)


@pytest.fixture
def triton(monkeypatch):
    """Triton with a driver that needs no GPU, taken for a version whose launcher was checked."""
    module = pytest.importorskip("triton", minversion="3.6", reason="the kernels need Triton 3.6 or later")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(kernels, "TRITON", kernels.CHECKED_LAUNCHERS[0])
    monkeypatch.setattr(module.runtime, "driver", Driver)
    return module


COMPILED = ((2, 3, 1), (1, 2.5), {"num_warps": 8, "num_stages": 3, "launch_pdl": False, "enable_fp_fusion": True})


def start(kernel, *keys):
    for key in keys:
        kernel(key if key is None else kernels.kernel_key(key), (2, 3, 1), 8, 3, 1, 2.5)


def test_a_kernel_is_compiled_once_a_key(triton):
    jitted = Jitted()
    start(kernels.Kernel(jitted), "a", "a", "b", None, None)
    assert jitted.calls == [COMPILED, ("directly", (2, 3, 1), (1, 2.5)), COMPILED, COMPILED, COMPILED]


def test_an_unchecked_version_of_triton_launches_by_itself(triton, monkeypatch):
    for unchecked in ((3, 5), (3, 7), (4, 0)):
        monkeypatch.setattr(kernels, "TRITON", unchecked)
        jitted = Jitted()
        start(kernels.Kernel(jitted), "a", "a", None)
        assert jitted.calls == [COMPILED] * 3


def test_a_kernel_overlaps_with_the_one_ahead_only_if_it_says_that_it_waits(triton):
    jitted = Jitted()
    start(kernels.Kernel(jitted, overlap=True), "a")
    assert jitted.calls[0][2]["launch_pdl"] == kernels.overlaps()


def test_where_somebody_watches_or_scratch_is_needed_triton_starts_it(triton, monkeypatch):
    jitted = Jitted()
    kernel = kernels.Kernel(jitted)
    start(kernel, "a")
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    start(kernel, "a")
    hook.remove(print)
    start(kernel, "a")
    monkeypatch.setattr(Launcher, "global_scratch_size", 16)
    start(kernel, "b", "b")
    plainly, directly = (("plainly", (2, 3, 1), (1, 2.5)), ("directly", (2, 3, 1), (1, 2.5)))
    assert jitted.calls == [COMPILED, plainly, directly, COMPILED, plainly]


def test_tensors_are_handed_on_as_addresses(triton):
    jitted, tensor = Jitted(), torch.zeros(3)
    kernel = kernels.Kernel(jitted)
    for _ in range(2):
        kernel(kernels.kernel_key("addresses"), (1, 1, 1), 8, 3, tensor, None, 2)
    assert jitted.calls[1] == ("directly", (1, 1, 1), (tensor.data_ptr(), None, 2))


def test_kernels_start_on_the_device_of_what_they_are_given(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    call = kernels.on_device_of(1)(lambda a, rows: (a, rows.device))
    for name, wanted in (("cpu", []), ("cuda:0", []), ("cuda:1", [torch.device("cuda:1")])):
        rows = SimpleNamespace(device=torch.device(name))
        assert call(7, rows) == (7, rows.device) and entered == wanted
