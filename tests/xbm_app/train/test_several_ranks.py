"""Whole runs under torchrun: the same figures, one log, a killed rank, and going on with another number of ranks."""

import csv
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.tiny import set_options, tiny_config
from tests.worlds import on_ranks
from xbm.distributed.ranks import the_ranks
from xbm.errors import InputError
from xbm_app.train.dataset import begin_run
from xbm_app.train.label_errors import IGNORED, ignore_label_errors
from xbm_app.train.loop import learn, train
from xbm_app.train.state import RunState

# Without batch norm's own statistics a rank more or less is only another order of summation.
SAME = {"model__freeze_batch_norm": True, "optim__iterations": 12, "optim__decay_at": (9,), "loss__reduction": "mean"}


def start(world: int, *words: object) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", "xbm"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*launcher, "train", *map(str, words)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def own(photos: Path, folder: Path, **changes: object) -> list[object]:
    return ["--data", photos, "--trunk", "small", "--out", folder, *set_options(**changes)]


def worker(process: subprocess.Popen, rank: int) -> int:
    """The process id of a rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in children:
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            return int(pid)
    raise LookupError(rank)


def trained(photos: Path, folder: Path) -> dict[str, float]:
    """R@1 of a run with each kind of memory. Three ranks share a batch of eight unevenly."""
    found = {}
    for spread in ("replicated", "sharded"):
        config = tiny_config(photos, memory__spread=spread, data__holdout=0.4, log__evaluate_every=8, **SAME)
        found[spread] = train(config, folder / spread, quiet=True)["recall@1"]
    return found


def test_three_ranks_train_the_model_of_one(photos, tmp_path):
    alone = trained(photos, tmp_path / "one")
    for found in on_ranks(3, trained, photos, tmp_path / "three"):
        assert found == pytest.approx(alone, abs=0.1)  # an image or two: models differ in their last bits
    for spread in alone:
        one, three = ((tmp_path / each / spread / "checkpoints" / "last.pt") for each in ("one", "three"))
        expected, found = (torch.load(path, weights_only=True) for path in (one, three))
        for part in ("model", "memory"):
            for name, value in expected[part].items():
                torch.testing.assert_close(found[part][name], value, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(found["tally"], expected["tally"], rtol=1e-3, atol=1e-3)
        assert (tmp_path / "three" / spread / "metrics.csv").read_text().count("\n") == 1 + 4, "one log"


def doubting(photos: Path, folder: Path) -> list[int]:
    """The stamps of this rank's memory after a few steps of which each looks at the labels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xbm_app.train.state.CHECK_STEPS", 1)
        patch.setattr("xbm_app.train.label_errors.MOST", 1.0)
        config = tiny_config(photos, memory__update="moving_average", memory__doubt="skip", data__noise=0.3, **SAME)
        run = RunState(config, begin_run(config, folder, the_ranks()), folder)
        assert run.label_check_every == 1
        for step, *batch in itertools.islice(run.data.batches(0), 5):
            learn(run, step, [batch], True)
            ignore_label_errors(run.memory, run.dataset.train.num_classes)
    return run.memory.stamps.tolist()


def test_ranks_doubt_the_same_labels(photos, tmp_path):
    one, two = on_ranks(2, doubting, photos, tmp_path / "two")
    assert one == two and 0 < one.count(IGNORED) < len(one)


def proxies(photos: Path, folder: Path) -> str:
    config = tiny_config(photos, loss__name="pml/ProxyAnchorLoss", memory__ratio=0.0, **SAME)
    with pytest.raises(InputError) as caught:
        train(config, folder, quiet=True)
    return str(caught.value)


def test_a_loss_with_proxies_is_refused_on_several_ranks(photos, tmp_path):
    for said in on_ranks(2, proxies, photos, tmp_path / "two"):
        assert said == "pml/ProxyAnchorLoss sees only the batch of its own process: train it without torchrun"


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["replicated", "sharded"])
def test_two_ranks_train_the_model_of_one(photos, tmp_path, spread):
    figures = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        code, out, err = finish(start(world, *own(photos, folder, memory__spread=spread, **SAME)))
        assert code == 0, err
        assert out.strip().endswith(str(folder)) and out.count("recall@1 ") == 1, "one rank talks"
        with (folder / "metrics.csv").open() as file:
            figures.append(list(csv.DictReader(file)))
    assert [row["step"] for row in figures[0]] == [row["step"] for row in figures[1]]
    for one, two in zip(*figures):
        for name in ("loss", "batch_loss", "memory_loss"):
            assert float(two[name] or 0) == pytest.approx(float(one[name] or 0), rel=1e-3, abs=1e-4), (name, one, two)
    states = [torch.load(tmp_path / str(world) / "checkpoints" / "last.pt", weights_only=True) for world in (1, 2)]
    for name in ("row_labels", "row_ids", "stamps", "pointer", "count", "clock"):
        assert torch.equal(states[0]["memory"][name], states[1]["memory"][name]), name
    torch.testing.assert_close(states[0]["memory"]["rows"], states[1]["memory"]["rows"], rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["replicated", "sharded"])
def test_a_killed_rank_ends_the_run_within_a_minute_and_others_go_on(photos, tmp_path, spread):
    folder = tmp_path / "run"
    changes = {"memory__spread": spread, "optim__iterations": 2000, "optim__decay_at": (1900,), "log__checkpoint_every": 10}
    process = start(2, *own(photos, folder, **changes))
    last = folder / "checkpoints" / "last.pt"
    deadline = time.monotonic() + 120
    while not last.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.kill(worker(process, 1), signal.SIGKILL)
    begun = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - begun < 60 and code != 0
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "another process of this run has ended" in said[0] and "--resume" in said[0], err

    at = int(torch.load(last, weights_only=True)["step"])
    for world in (1, 3):
        copy = tmp_path / f"resumed on {world}"
        shutil.copytree(folder, copy)
        config = (copy / "config.yaml").read_text()
        (copy / "config.yaml").write_text(config.replace("iterations: 2000", f"iterations: {at + 20}"))
        code, _, err = finish(start(world, "--resume", copy))
        assert code == 0, err
        assert json.loads((copy / "result.json").read_text())["iterations"] == at + 20
