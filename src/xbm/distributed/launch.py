"""Joins the processes that torchrun started into one group, and leaves it in an orderly way however the run ends."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

# Its functions have the group of the moment as a default: imported later, as parts of torch do, they would keep ours beyond its
# end, and the group's threads would meet the end of the process.
import torch.distributed.nn

from xbm.distributed.heartbeat import Heartbeat
from xbm.distributed.ranks import Ranks, the_ranks
from xbm.errors import TerminatedError


@contextmanager
def together(device: str = "auto") -> Iterator[Ranks]:
    """The ranks of this run: one, unless torchrun started several. On GPUs each takes the one of its local number.

    Example:
        >>> with together() as ranks:
        ...     ranks.world
        1
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or dist.is_initialized():
        yield the_ranks()
        return
    on_gpu = torch.cuda.is_available() and not device.startswith("cpu")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # Long, since all wait for rank 0 while it writes: a rank that is gone is the heartbeat's to notice.
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(minutes=30))
    ranks = the_ranks()
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=15))
    before = signal.signal(signal.SIGTERM, _told_to_end)
    try:
        with Heartbeat(store, ranks.rank, world):
            yield ranks
            ranks.wait()
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the reason is known; a second one would only hide it
        raise
    signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()


def _told_to_end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise TerminatedError("this process was told to end, as torchrun does when another has")
