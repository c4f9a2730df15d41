"""What a training step takes under several configs: in turns in one process, so that what slows the machine slows them all."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch

from xbm_app.train.config import Config
from xbm_app.train.console import Console
from xbm_app.train.dataset import read_run
from xbm_app.train.job import Job
from xbm_app.train.loop import steps

TURNS = 12


class Steps:
    """Trains as a config says, some steps at a time. Its memory, if it has one, is on from the first."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.job = Job(config, read_run(config, folder), folder)
        self.job.model.train()
        self.learn_next = steps(self.job, 0, Console(config, 0, quiet=True))
        self.done = 0

    def seconds(self, count: int) -> float:
        """What the next so many take, each; the device is waited for."""
        self._wait()
        begun = time.perf_counter()
        for step in range(self.done, self.done + count):
            self.job.set_learning_rate(step)
            self.learn_next(step, self.job.memory is not None)
            self.job.doubt_labels(step + 1)
        self._wait()
        self.done += count
        return (time.perf_counter() - begun) / count

    def _wait(self) -> None:
        if self.job.device.type == "cuda":
            torch.cuda.synchronize(self.job.device)


def in_turns(configs: Mapping[str, Config], folder: Path) -> dict[str, list[float]]:
    """Seconds a step, turn by turn, after a quarter of the shortest schedule, in which kernels are compiled and memories fill.

    Args:
        configs: by name; they train on the same data.
        folder: of a run on that data.
    """
    trained = {name: Steps(config, folder) for name, config in configs.items()}
    length = min(config.optim.iterations for config in configs.values())
    warm = max(1, length // 4)
    turns = min(TURNS, length - warm)
    for each in trained.values():
        each.seconds(warm)
    found: dict[str, list[float]] = {name: [] for name in configs}
    order = list(configs)
    for _ in range(turns):
        for name in order:
            found[name].append(trained[name].seconds((length - warm) // turns))
        order.reverse()  # nobody is always the one that follows
    return found
