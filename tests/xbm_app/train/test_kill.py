"""A training process killed by SIGKILL ten times over, anywhere, ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import differences, tiny_config
from tests.xbm_app.train.test_resume import CASES
from xbm_app.train.config import to_dict

SCRIPT = "tests.xbm_app.train.interrupted"


def run(config, folder: Path, kills: int, seed: int = 0) -> int:
    task = {"config": to_dict(config), "folder": str(folder), "seed": seed, "kills": kills, "lines": 6000}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", SCRIPT], input=json.dumps(task), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_ten_times_ends_bit_for_bit_as_one_that_was_not(photos, tmp_path, case):
    config = tiny_config(photos, **{**CASES[case], "optim__iterations": 37})
    assert run(config, tmp_path / "whole", kills=0) == 0
    assert run(config, tmp_path / "killed", kills=10, seed=len(case)) == 10
    assert differences(tmp_path / "whole", tmp_path / "killed") == []
