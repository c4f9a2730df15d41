"""The kernels run under Triton's interpreter, which must be switched on before anything imports triton: see test_kernels.py."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [] if INTERPRETED else [
    "test_bank_pass.py", "test_finish.py", "test_loss_formulas.py", "test_memory_kernels.py", "test_positives.py",
    "test_primitives.py", "test_step.py",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _plans_are_made_anew():
    from xbm.engine.triton import plan

    torch.manual_seed(0)
    plan.plan.cache_clear()
    plan.settings.cache_clear()
    yield
    plan.plan.cache_clear()
    plan.settings.cache_clear()


if INTERPRETED:
    from tests.xbm.engine.triton import interpreter_fixes  # noqa: F401
