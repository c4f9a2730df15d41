"""Kernel plumbing: which devices can run Triton kernels, and how a kernel is compiled once and then launched directly.

Used by the GPU engine, the fused layers and the crop kernel. Importing this module imports neither Triton nor CUDA.
"""

import os
import re
import warnings
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

__all__ = [
    "HAS_TRITON", "INTERPRETED", "Kernel", "has_kernels", "is_aligned", "kernel_key", "lacks", "on_device_of", "overlaps",
    "resources",
]  # fmt: skip

# The oldest that compiles the kernels: up to 3.3 there is no gdc_wait and no descriptor, 3.4 fails at gdc_wait, and 3.5 fetches
# a tile of the bank into a buffer that is still being read.
OLDEST_TRITON = (3, 6)
CHECKED_LAUNCHERS = ((3, 6),)  # the versions whose private launcher was called on a GPU, see `direct_launch`


def find_triton() -> tuple[int, int] | None:
    """Triton's version, None without one. It is read and not imported: Triton takes a while, and old versions may fail."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:  # a folder called triton on the path has no origin
        return None
    found = re.search(r"^__version__ = ['\"](\d+)\.(\d+)", Path(spec.origin).read_text(encoding="utf-8"), re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else (0, 0)


TRITON = find_triton()
HAS_TRITON = TRITON is not None and TRITON >= OLDEST_TRITON  # one that the kernels can use
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")  # as Triton reads it

Function = TypeVar("Function", bound=Callable)


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels can run on a device; on a GPU where they cannot, the first call warns."""
    if device.type != "cuda":
        return False
    if torch.compiler.is_compiling():  # the compiler reads the properties once, and cannot trace through the cache
        return HAS_TRITON and torch.version.hip is None and torch.cuda.get_device_properties(device).major >= 8
    return _can_run(device)


@lru_cache
def _can_run(device: torch.device) -> bool:
    lack = lacks(device)
    if lack is not None:
        _warn(f"the GPU kernels of xbm need {lack}: their work is left to torch, which is slower")
    return lack is None


@lru_cache
def _warn(sentence: str) -> None:
    """Warns once in a process, however many GPUs there are."""
    warnings.warn(sentence, stacklevel=4)


def lacks(device: torch.device) -> str | None:
    """What the kernels need and a device does not have; None if they run there."""
    if device.type != "cuda":
        return f"an NVIDIA GPU (this is {device.type})"
    if torch.version.hip is not None:
        return "an NVIDIA GPU (this torch is built for ROCm)"
    if not HAS_TRITON:
        found = "none" if TRITON is None else "{}.{}".format(*TRITON)
        return "Triton {}.{} or later (installed: {})".format(*OLDEST_TRITON, found)
    properties = torch.cuda.get_device_properties(device)
    if properties.major < 8:
        return f"compute capability 8.0 or later ({properties.name} has {properties.major}.{properties.minor})"
    return None


@lru_cache
def overlaps() -> bool:
    """Whether a kernel can be launched while the previous one is still running, and wait for it: on Hopper and later."""
    return not INTERPRETED and all(torch.cuda.get_device_capability(k) >= (9, 0) for k in range(torch.cuda.device_count()))


@lru_cache(maxsize=16)
def resources(device: torch.device) -> tuple[int, int]:
    """The number of multiprocessors, and the bytes of shared memory available to one program."""
    if device.type != "cuda":
        return 3, 227 * 1024  # the interpreter: a few, so that every reduction has something to reduce
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 48 * 1024)


def on_device_of(position: int) -> Callable[[Function], Function]:
    """Decorates a function that launches kernels, so that they run on the device of its argument at `position`.

    Kernels run on the current device, which need not be that of the tensors.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            device = arguments[position].device
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return function(*arguments, **named)
            with torch.cuda.device(device):
                return function(*arguments, **named)

        return cast(Function, call)

    return decorate


_keys: dict[tuple, int] = {}


def kernel_key(*parts: Any) -> int:
    """A number for a combination of types and constants. Launches look it up; a tuple would be hashed every time."""
    return _keys.setdefault(parts, len(_keys))


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether every tensor starts at a multiple of 16 bytes, which is what kernels found by a key are compiled for."""
    return all(x is None or x.data_ptr() % 16 == 0 for x in tensors)


class Kernel:
    """A jitted function together with its compiled variants.

    Triton's own launch inspects every argument, which takes longer than the small kernels run. Here the compiled kernel is
    stored under a key that covers everything Triton would specialize on, and is launched directly. With a version of Triton
    for which this was not checked, every launch is Triton's own.

    Args:
        overlap: launch it before the previous kernel has ended. The jitted function must then wait by itself, in its first
            line (see `wait_for_previous` of the engine). This hides a microsecond or two, and takes space on the
            multiprocessors from whatever runs beside it.
    """

    def __init__(self, jitted: Any, overlap: bool = False) -> None:
        self.jitted, self.overlap = jitted, overlap and overlaps()
        self.compiled: dict[int | tuple, Callable] = {}

    def __call__(self, key: int | tuple | None, grid: tuple[int, int, int], warps: int, stages: int, *arguments: Any) -> None:
        """Launches the kernel. `key` identifies the variant; without one, Triton inspects the arguments."""
        launch = self.compiled.get(key) if key is not None else None
        if launch is not None:
            launch(grid, *arguments)
            return
        compiled = self.jitted[grid](
            *arguments, num_warps=warps, num_stages=stages, launch_pdl=self.overlap, enable_fp_fusion=True
        )  # fused multiply-add: the default up to Triton 3.9, which warns that 3.10 changes it
        if key is not None and not INTERPRETED and TRITON in CHECKED_LAUNCHERS:
            self.compiled[key] = direct_launch(compiled)


def direct_launch(compiled: Any) -> Callable:
    """A function of (grid, *arguments) that launches a compiled kernel with as little Python in between as possible.

    It calls Triton's private launcher the way Triton does for kernels without scratch memory. The launcher takes its
    arguments by position, in an order that differs between versions: only those of CHECKED_LAUNCHERS may come here. If the
    kernel needs scratch memory, the result launches it through Triton.
    """
    import triton

    def through_triton(grid: tuple[int, int, int], *arguments: Any) -> None:
        compiled[grid](*arguments)

    knobs, driver, launcher = triton.knobs.runtime, triton.runtime.driver.active, compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return through_triton
    launch, cooperative_grid, pdl = launcher.launch, launcher.launch_cooperative_grid, launcher.launch_pdl
    function, metadata = compiled.function, compiled.packed_metadata
    enter_hooks, exit_hooks = knobs.launch_enter_hook.calls, knobs.launch_exit_hook.calls

    def directly(grid: tuple[int, int, int], *arguments: Any) -> None:
        if enter_hooks or exit_hooks:  # a profiler is attached
            return through_triton(grid, *arguments)
        stream = driver.get_current_stream(driver.get_current_device())
        # For a tensor, the launcher asks the driver whether the device can reach it; it takes an address as it is.
        addresses = [x.data_ptr() if type(x) is Tensor else x for x in arguments]
        scratch = hook_metadata = enter_hook = exit_hook = None
        launch(
            *grid, stream, function, cooperative_grid, pdl, scratch, scratch, metadata, hook_metadata, enter_hook, exit_hook,
            *addresses,
        )  # fmt: skip
        return None

    return directly
