"""Starting kernels: the first call compiles, the next ones go straight to what was compiled."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import triton

from xbm import kernels


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


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(triton.runtime, "driver", Driver)


COMPILED = ((2, 3, 1), (1, 2.5), {"num_warps": 8, "num_stages": 3, "launch_pdl": False})


def start(kernel, *keys):
    for key in keys:
        kernel(key if key is None else kernels.kernel_key(key), (2, 3, 1), 8, 3, 1, 2.5)


def test_a_kernel_is_compiled_once_a_key():
    jitted = Jitted()
    start(kernels.Kernel(jitted), "a", "a", "b", None, None)
    assert jitted.calls == [COMPILED, ("directly", (2, 3, 1), (1, 2.5)), COMPILED, COMPILED, COMPILED]


def test_a_kernel_overlaps_with_the_one_ahead_only_if_it_says_that_it_waits():
    jitted = Jitted()
    start(kernels.Kernel(jitted, overlap=True), "a")
    assert jitted.calls[0][2]["launch_pdl"] == kernels.overlaps()


def test_where_somebody_watches_or_scratch_is_needed_triton_starts_it(monkeypatch):
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


def test_tensors_are_handed_on_as_addresses():
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
