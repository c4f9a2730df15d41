"""Checkpoints that survive a kill at any moment: written beside the target, synced, renamed; read without running code."""

from pathlib import Path
from typing import Any

import torch

from xbm.errors import DamagedFileError, InputError
from xbm_app.train.files import replacing, unwritable

FORMAT = 1


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replaces `path` by `state`, wholly or not at all.

    Raises:
        InputError: the disk is full or not writable; the file that was there before is still there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside, open(beside, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as error:
        # torch hides a failed write behind a RuntimeError of its own
        first = error if isinstance(error, OSError) else error.__context__
        if not isinstance(first, OSError):
            raise
        raise unwritable(path, first.strerror or str(first), path) from None


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What `write_checkpoint` wrote.

    Raises:
        InputError: there is none, it cannot be read, or it was written by a newer version.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: there is nothing to resume or to load here") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the readers fail in many ways on a broken file: all of them mean the same to the user
        raise DamagedFileError(
            path, f"{path} cannot be read as a checkpoint (cut short, damaged, or with code in it): {_instead(path)}"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise DamagedFileError(path, f"{path} is not a checkpoint of xbm: give a run folder made by `xbm train`")
    if state["format"] > FORMAT:
        raise InputError(f"{path} has format {state['format']}, this version reads up to {FORMAT}: upgrade xbm")
    return state


def _instead(path: Path) -> str:
    others = sorted(other for other in path.parent.glob("*.pt") if other != path and ".part" not in other.name)
    return f"copy {others[0]} over it, or start a new run" if others else "restore it from a copy, or start a new run"
