"""Starts kernels. Triton's own call looks at every argument anew, which takes longer than the small kernels run; here the
compiled kernel is kept under a key that says all that matters, and started directly.
"""

from typing import Any

import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)


class Kernel:
    """A jitted function and what it was compiled to."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self.compiled: dict[tuple, Any] = {}

    def __call__(self, key: tuple | None, grid: tuple[int, int, int], warps: int, stages: int, *arguments: Any) -> None:
        """`key` tells apart all that Triton would compile differently: types, alignments, constants. None: unknown."""
        ready = self.compiled.get(key) if key is not None else None
        if ready is not None:
            ready[grid](*arguments)
            return
        found = self.jitted[grid](*arguments, num_warps=warps, num_stages=stages)
        if key is not None and not INTERPRETED:
            self.compiled[key] = found
