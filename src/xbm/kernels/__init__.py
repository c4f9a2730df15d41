"""Whether Triton kernels can run on a device. `xbm.kernels.launch`, which needs Triton, starts them."""

import os
from functools import lru_cache
from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

__all__ = ["HAS_TRITON", "INTERPRETED", "has_kernels"]


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels can run there."""
    if not HAS_TRITON or device.type != "cuda":
        return False
    if torch.compiler.is_compiling():  # which reads the properties once, and cannot see through the cache
        return torch.cuda.get_device_properties(device).major >= 8
    return _is_recent(device)


@lru_cache
def _is_recent(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).major >= 8
