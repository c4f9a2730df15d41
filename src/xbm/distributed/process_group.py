"""Joins the processes that torchrun started into one group, and ends them cleanly, even if one of them dies.

A heartbeat detects a rank that died, froze or cannot be reached, and ends this process with one line instead of waiting for it.
Each rank increments a counter in the store of the group and watches that of the next rank. If that stops, it says so in the
store, where all ranks look. A rank that ends with an error leaves its message there.
"""

import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

# Its functions take the current default group as a default argument. Imported later, as parts of torch do, they would keep our
# group and its threads alive until the interpreter exits.
import torch.distributed.nn

from xbm.distributed.ranks import Ranks, the_ranks
from xbm.errors import InputError, LostPeerError, TerminatedError

PERIOD = 2.0  # seconds between two heartbeats
SILENCE = 20.0  # seconds without a heartbeat after which a rank counts as lost
GRACE = 5.0  # seconds in which the main thread may notice by itself, through a failed exchange
TORCHRUN = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets besides the number of processes
REASON, BEAT = "xbm/reason", "xbm/beat"  # keys in the store


@contextmanager
def together(device: str = "auto") -> Iterator[Ranks]:
    """Yields the ranks of this run: one, unless torchrun started several. On GPUs each rank uses the GPU of its local rank.

    Example:
        >>> with together() as ranks:
        ...     ranks.world
        1
    """
    size = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in TORCHRUN if not os.environ.get(name)]
    if not dist.is_initialized() and size != "1" and (missing or not size.isdecimal()):
        unset = f"{' and '.join(missing)} not set" if missing else "not a number"
        raise InputError(f"WORLD_SIZE is {size!r} in the environment, but {unset}: start with torchrun, or unset WORLD_SIZE")
    world = int(size)
    if world == 1 or dist.is_initialized():
        yield the_ranks()
        return
    on_gpu = torch.cuda.is_available() and not device.startswith("cpu")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # A long timeout, since all ranks wait for rank 0 while it writes. The heartbeat detects lost ranks much sooner.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(minutes=30))
    ranks = the_ranks()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=15))
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        with Heartbeat(store, ranks.rank, world):
            yield ranks
            ranks.wait()
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second error would only hide the first
        raise
    signal.signal(signal.SIGTERM, before)
    leave()


def leave() -> None:
    """Ends this process's part in the group.

    Before torch 2.8, a group is destroyed while Python is locked, and waits for threads that may be waiting for Python to free
    the tensors of the last exchange: often both wait forever. A pause lets these threads finish.
    """
    if torch.__version__ < "2.8":  # compares versions, not text
        time.sleep(0.1)
    dist.destroy_process_group()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise TerminatedError("this process received SIGTERM, which torchrun sends when another process has ended")


class Heartbeat:
    """Runs a thread inside a `with` block that ends this process if another rank is lost."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.next = store, rank, (rank + 1) % world
        self._done = Event()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join(timeout=PERIOD)
        if error is not None:
            self._report(f"rank {self.rank}: {textwrap.shorten(str(error), 1000) or type(error).__name__}")

    def _report(self, reason: str) -> None:
        try:
            if not self.store.check([REASON]):  # the first rank to end knows the cause
                self.store.set(REASON, reason)
        except dist.DistError:  # without the store there is nobody to report to
            return

    def _run(self) -> None:
        beats, latest, heard = 0, b"", time.monotonic()
        while not self._done.wait(PERIOD):
            beats += 1
            try:
                self.store.set(f"{BEAT}/{self.rank}", str(beats))
                reason = self.store.get(REASON).decode() if self.store.check([REASON]) else ""
                key = f"{BEAT}/{self.next}"
                beat = self.store.get(key) if self.store.check([key]) else b""
            except dist.DistError as error:
                reason, beat = f"the store of the group is gone: {textwrap.shorten(str(error), 80)}", b""
            if beat != latest:
                latest, heard = beat, time.monotonic()
            elif not reason and time.monotonic() - heard > SILENCE:
                reason = f"rank {self.next} has been silent for {SILENCE:.0f} s"
                self._report(reason)
            if reason:
                return self._exit(reason)

    def _exit(self, reason: str) -> None:
        if not self._done.wait(GRACE):
            # One write with its newline, since other ranks write to the same terminal now.
            sys.stderr.write(f"error: {LostPeerError(reason)}\n")
            sys.stderr.flush()
            os._exit(2)
