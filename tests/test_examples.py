"""Every example runs as its first lines say, in under a minute, and what it trains gets better."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {
    "lightning_trainer": "lightning",
    "text_pairs": "accelerate",
    "sentence_pairs": "sentence_transformers",
    "metric_learning": "pytorch_metric_learning",
}


def run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    around = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=around, timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_and_learns(path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem], reason=f"{path.name} needs {NEEDS[path.stem]}")
    launcher = [sys.executable]
    if "torchrun" in path.read_text().splitlines()[0]:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*launcher, path)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss['\"]?:? ?['\"]?([0-9.]+[0-9])", done.stdout)]
    assert len(losses) >= 3 and losses[-1] < losses[0], done.stdout


@pytest.mark.slow
def test_two_network_namespaces_are_two_hosts(tmp_path):
    settings = ("optim.iterations=20", "optim.decay_at=15", "memory.start=5")
    words = [word for setting in settings for word in ("--set", setting)]
    done = run(EXAMPLES / "two_hosts.sh", tmp_path / "run", "--quiet", *words, PYTHON=sys.executable)
    if done.returncode == 77 or "command not found" in done.stderr:
        pytest.skip("network namespaces are not permitted here")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists() and "bytes that went over the cable" in done.stdout
