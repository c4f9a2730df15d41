"""Ends a run at some line of the training code: by an exception, or for good.

As a script it is given {"config": ..., "folder": ..., "seed": ..., "kills": ..., "lines": ...} and trains in children of its
own, each killed by a real SIGKILL, then in one that is left alone; it prints how many were killed.
"""

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

import xbm
from xbm_app.train.config import Config, from_dict
from xbm_app.train.loop import train

SOURCE = Path(xbm.__file__).parents[1]
TRACED = tuple(str(SOURCE / part) for part in ("xbm_app/train", "xbm_app/files.py", "xbm/memory.py"))


class Killed(BaseException):
    """Not an Exception, as nothing may catch it."""


@contextmanager
def ended_at_line(number: int, end: Callable[[], None]) -> Iterator[None]:
    """Calls `end` before the `number`-th line that runs in the training code, the memory or the drift."""
    left = number

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                end()
        return count

    def choose(frame: FrameType, event: str, _: Any) -> Any:
        return count if frame.f_code.co_filename.startswith(TRACED) else None

    sys.settrace(choose)
    try:
        yield
    finally:
        sys.settrace(None)


@contextmanager
def ended_in_checkpoint(number: int, end: Callable[[], None]) -> Iterator[None]:
    """Calls `end` when half of the `number`-th checkpoint is on the disk."""
    left, save = number, torch.save

    def half(state: Any, file: Any) -> None:
        nonlocal left
        save(state, file)
        left -= 1
        if left == 0:
            file.truncate(file.tell() // 2)
            file.flush()
            end()

    with patch("torch.save", half):
        yield


def ended(draw: random.Random, lines: int, end: Callable[[], None]) -> Any:
    """One of the two ways, at random: where `lines` is about how many a whole run takes."""
    if draw.random() < 0.2:
        return ended_in_checkpoint(draw.choice((1, 2)), end)
    return ended_at_line(draw.randrange(1, lines), end)


def in_a_child(work: Callable[[], Any]) -> int:
    """Runs `work` in a fork of this process and returns the signal that ended it, 0 if none did."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    if os.WEXITSTATUS(status):
        raise RuntimeError("a child failed: see above")
    return 0


def main() -> None:
    for slow in ("torch._dynamo", "torch.utils.tensorboard"):  # loaded at the first step: done here, the children need not
        import_module(slow)
    task = json.loads(sys.stdin.read())
    config: Config = from_dict(task["config"])
    folder, draw, killed = Path(task["folder"]), random.Random(task["seed"]), 0

    def attempt() -> None:
        with ended(draw, task["lines"], lambda: os.kill(os.getpid(), signal.SIGKILL)):
            train(config, folder, resume=(folder / "config.yaml").exists(), quiet=True)

    for _ in range(20 * task["kills"]):
        if killed == task["kills"]:
            break
        killed += in_a_child(attempt) == signal.SIGKILL
        draw.random()  # the children draw from copies: without this all would die at the same place
    in_a_child(lambda: train(config, folder, resume=(folder / "config.yaml").exists(), quiet=True))
    print(killed)


if __name__ == "__main__":
    main()
