"""Checkpoints that survive a kill at any moment: written beside the target, synced, renamed; read without running code."""

import os
from pathlib import Path
from typing import Any

import torch

from xbm.errors import InputError

FORMAT = 1


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replaces `path` by `state`, wholly or not at all.

    Raises:
        InputError: the disk is full or not writable; the file that was there before is still there.
    """
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:  # torch wraps a failed write in a RuntimeError
        beside.unlink(missing_ok=True)
        kept = "the checkpoint before it is unharmed" if path.exists() else "no checkpoint had been written yet"
        raise InputError(
            f"could not write {path} ({_first_line(error)}); {kept}: free some space and go on with --resume"
        ) from None


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What `write_checkpoint` wrote.

    Raises:
        InputError: there is none, it cannot be read, or it was written by a newer version.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: there is nothing to resume or to load here") from None
    except Exception as error:  # a broken file can fail in many ways: all of them mean the same to the user
        raise InputError(
            f"{path} cannot be read as a checkpoint ({_first_line(error)}): use another one, such as best.pt beside it"
        ) from None
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise InputError(f"{path} is not a checkpoint of xbm: give a run folder made by `xbm train`")
    if state["format"] > FORMAT:
        raise InputError(f"{path} has format {state['format']}, this version reads up to {FORMAT}: upgrade xbm")
    return state


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
