"""Starts kernels. Triton's own call looks at every argument anew, which takes longer than the small kernels run; here the
compiled kernel is kept under a key that says all that matters, and started directly.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["INTERPRETED", "Kernel", "await_others", "number", "on_device_of", "resources"]

Function = TypeVar("Function", bound=Callable)

INTERPRETED = bool(triton.knobs.runtime.interpret)

# Whether a kernel can be started while the one before it still runs, and wait by itself: on Hopper and later.
OVERLAP = not INTERPRETED and all(torch.cuda.get_device_capability(k) >= (9, 0) for k in range(torch.cuda.device_count()))
_OVERLAP = tl.constexpr(OVERLAP)


@triton.jit
def await_others() -> None:
    """The first line of a kernel that overlaps with others: what it reads may not have been written yet."""
    if _OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class Kernel:
    """A jitted function and what it was compiled to.

    Args:
        overlap: whether it is started before the kernel ahead of it has ended: its first line must then be `await_others()`.
            That hides a microsecond or two, and takes room on the processors from whatever runs beside.
    """

    def __init__(self, jitted: Any, overlap: bool = False) -> None:
        self.jitted, self.overlap = jitted, overlap and OVERLAP
        self.compiled: dict[int | tuple, Callable] = {}

    def __call__(self, key: int | tuple | None, grid: tuple[int, int, int], warps: int, stages: int, *arguments: Any) -> None:
        """`key`, from `number`, tells apart all that Triton would compile differently. None: unknown."""
        ready = self.compiled.get(key) if key is not None else None
        if ready is not None:
            ready(grid, *arguments)
            return
        found = self.jitted[grid](*arguments, num_warps=warps, num_stages=stages, launch_pdl=self.overlap)
        if key is not None and not INTERPRETED:
            self.compiled[key] = starter(found)


def on_device_of(place: int) -> Callable[[Function], Function]:
    """Kernels start on the device that is current: for a function whose argument at `place` may lie on another one."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            device = arguments[place].device
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return function(*arguments)
            with torch.cuda.device(device):
                return function(*arguments)

        return cast(Function, call)

    return decorate


_numbers: dict[tuple, int] = {}


def number(*what: Any) -> int:
    """A number for types, alignments and constants: all kernels of a step look it up, and a tuple is hashed every time."""
    return _numbers.setdefault(what, len(_numbers))


def starter(compiled: Any) -> Callable:
    """A function of (grid, *arguments) that starts a compiled kernel, with as little as possible in between."""

    def plainly(grid: tuple[int, int, int], *arguments: Any) -> None:
        compiled[grid](*arguments)

    runtime, driver = triton.knobs.runtime, triton.runtime.driver.active
    launcher = compiled.run
    try:  # what Triton's launcher does where a kernel needs no scratch memory
        start, cooperative, pdl = launcher.launch, launcher.launch_cooperative_grid, launcher.launch_pdl
        function, metadata = compiled.function, compiled.packed_metadata
        watchers = runtime.launch_enter_hook.calls, runtime.launch_exit_hook.calls
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return plainly
    except AttributeError:  # another version of Triton
        return plainly

    def directly(grid: tuple[int, int, int], *arguments: Any) -> None:
        if watchers[0] or watchers[1]:  # somebody profiles
            return plainly(grid, *arguments)
        stream = driver.get_current_stream(driver.get_current_device())
        # of a number the launcher asks nothing; of every tensor it asks the driver whether the device can reach it
        given = [x.data_ptr() if type(x) is Tensor else x for x in arguments]
        start(*grid, stream, function, cooperative, pdl, None, None, metadata, None, None, None, *given)
        return None

    return directly


@lru_cache(maxsize=16)
def resources(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 3, 227 * 1024  # the interpreter: a few, so that every reduction has something to reduce
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 48 * 1024)
