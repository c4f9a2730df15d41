"""Compiles the kernels of a step for an H200 without having one: what would be launched is recorded and compiled instead."""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from xbm.engine.triton import plan
from xbm.kernels import Kernel

PROCESSORS, SHARED = 132, 227 * 1024  # of an H200
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


class Compiled(NamedTuple):
    name: str
    shared: int  # bytes
    registers: int  # of a thread
    spilled: int  # bytes of a thread's stack
    tensor_cores: int  # instructions
    fetches_ahead: bool
    races: bool  # it is started before the kernels ahead of it have ended, and does not wait for them
    torn: bool  # a tile is overwritten by one that is fetched ahead before its last use: the compiler does not always see it

    def __str__(self) -> str:
        return (
            f"{self.name:9} shared {self.shared / 1024:5.1f} KB, {self.registers} registers, {self.spilled} bytes spilled, "
            f"{self.tensor_cores} tensor core instructions, {'fetches ahead' if self.fetches_ahead else 'no fetching ahead'}"
            f"{', TORN' if self.torn else ''}"
        )


@contextmanager
def recorded() -> Iterator[list[tuple]]:
    """Launches are noted down (kernel, warps, stages, arguments), and the planner thinks that it has an H200."""
    launches: list[tuple] = []

    def note(self: Kernel, key: Any, grid: tuple, warps: int, stages: int, *arguments: Any) -> None:
        assert all(0 < side < 65536 for side in grid[1:]) and 0 < grid[0] < 1 << 31
        launches.append((self, warps, stages, arguments))

    call, resources = Kernel.__call__, plan.resources
    Kernel.__call__, plan.resources = note, lambda device: (PROCESSORS, SHARED)  # type: ignore[method-assign,assignment]
    plan.plan.cache_clear()
    plan.settings.cache_clear()
    try:
        yield launches
    finally:
        plan.plan.cache_clear()
        plan.settings.cache_clear()
        Kernel.__call__, plan.resources = call, resources  # type: ignore[method-assign]


def compiled(kernel: Kernel, warps: int, stages: int, arguments: tuple) -> Compiled:
    jitted = kernel.jitted
    signature, constants, attributes = {}, {}, {}
    for place, (parameter, value) in enumerate(zip(jitted.params, arguments, strict=True)):
        name = parameter.name
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, Tensor):
            signature[name], attributes[(place,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            assert parameter.do_not_specialize, f"a new kernel for every {name}"
            signature[name] = "i32"
        else:
            signature[name] = "fp32"
    source = ASTSource(jitted, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = next(path for name, path in found.metadata_group.items() if name.endswith(".cubin"))
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    ptx = found.asm["ptx"]
    cores = ptx.count("wgmma.mma_async") + ptx.count("mma.sync")
    torn = _torn(found.asm["ttgir"], stages)
    return Compiled(
        jitted.__name__, found.metadata.shared, registers, stack, cores, "cp.async.c" in ptx or "cp.async.bulk" in ptx,
        kernel.overlap and "griddepcontrol.wait" not in re.split(r"\bld\.global|\bst\.global|\bcp\.async", ptx)[0], torn,
    )  # fmt: skip


def _torn(ttgir: str, stages: int) -> bool:
    """Fetching `stages` − 1 tiles ahead takes as many buffers, and one more if the fetch comes before a tile's last use."""
    lines = ttgir.splitlines()
    for buffer, many in re.findall(r"%(\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", ttgir):
        names, copied, used = {buffer}, None, None
        inside = False
        for number, line in enumerate(lines):
            inside = inside or ("scf.for" in line and bool(re.search(rf"%{buffer}\b", "\n".join(lines[number:]))))
            if made := re.match(r"\s*%(\w+)(?::\d+)? = ttg\.memdesc_(?:index|trans|subslice)\w* %(\w+)", line):
                if made.group(2) in names:
                    names.add(made.group(1))
                continue
            defined = re.match(r"\s*%(\w+)(?::\d+)? = ", line)
            uses = names & set(re.findall(r"%(\w+)", line[defined.end() :] if defined else line))
            if defined and "ttg.local_alloc : ()" not in line:
                names.discard(defined.group(1))  # names are given again in other regions
            if not inside or not uses:
                continue
            if "async_copy" in line:
                copied = number
            elif "warp_group_dot " in line or "local_load" in line or "tt.dot" in line:
                used = number
        if copied is not None and used is not None and int(many) < stages - 1 + (copied < used):
            return True
    return False


def compile_step(call: Callable[[], Any]) -> list[Compiled]:
    """Every kernel that `call` would launch."""
    with recorded() as launches:
        call()
    return [compiled(*launch) for launch in launches]
