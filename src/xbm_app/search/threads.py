"""How many threads a model gets: as many as make it fastest on this machine, right now."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from xbm_app.train.load import Embedder


@contextmanager
def quickest_threads(model: Embedder, batch: int) -> Iterator[int]:
    """Runs what is inside with one thread or with all, whichever embeds a batch faster.

    Small nets on small images lose more to threads that wait for each other than they gain, on a busy machine a hundred times
    more; large ones need all cores.

    Args:
        batch: images at once.
    """
    before = torch.get_num_threads()
    side, channels = model.augmentation.resize, model.augmentation.channels
    views = [np.zeros((side, side, channels), np.uint8)] * batch

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        taken = []
        for _ in range(3):
            begun = time.perf_counter()
            model.embed_views(views)
            taken.append(time.perf_counter() - begun)
        return min(taken[1:])

    chosen = before
    if before > 1 and model.device.type == "cpu":
        chosen = min((1, before), key=seconds)
    torch.set_num_threads(chosen)
    try:
        yield chosen
    finally:
        torch.set_num_threads(before)
