"""Runs a function on several processes of one gloo group, and the scenes that tests play on one process and on many."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from xbm.distributed import GlobalLoss, Ranks, ReplicatedMemory, ShardedMemory
from xbm.distributed.ranks import leave
from xbm.losses import LOSSES
from xbm.memory import CrossBatchMemory

# A server imports once what costs seconds, and every rank is a fork of it.
multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "xbm.distributed"])
MEMORIES = {"replicated": ReplicatedMemory, "sharded": ShardedMemory}


def on_ranks(world: int, call: Callable[..., Any], *given: Any, allow_deaths: bool = False) -> list[Any]:
    """What `call(*given)` returns on each of `world` ranks, None for one that died. `call` must be a function of a module."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        processes = [context.Process(target=_enter, args=(rank, world, folder, call, given)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
            if process.is_alive():
                process.kill()  # which its exit code then tells
                process.join()
        codes = [process.exitcode for process in processes]
        assert allow_deaths or codes == [0] * world, f"ranks ended with {codes}: see above"
        paths = [Path(folder) / f"{rank}.pt" for rank in range(world)]
        return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def _enter(rank: int, world: int, folder: str, call: Callable[..., Any], given: tuple) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    torch.save(call(*given), Path(folder) / f"{rank}.pt")
    leave()


class Scene(NamedTuple):
    """Global batches that any number of ranks share: batch k is `sizes(world, k)` rows for each of them."""

    update: str = "queue"
    mode: str = "replicated"
    loss: str = "contrastive"
    uneven: bool = False
    exclude: str | None = None
    reduction: str = "mean"
    steps: int = 50
    size: int = 37  # M; no multiple of the batch, nor of a number of ranks
    m: int = 12
    dim: int = 8
    dtype: torch.dtype = torch.float32

    def batch(self, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs (m, 10), labels, ids and mask of the k-th global batch."""
        draw = torch.Generator().manual_seed(1000 + k)
        ids = torch.randint(0, self.size, (self.m,), generator=draw)
        inputs = torch.randn(self.m, 10, generator=draw) + F.one_hot(ids % 5, 10)
        return inputs, ids % 5, ids, torch.rand(self.m, generator=draw) < 0.8

    def sizes(self, world: int, k: int) -> list[int]:
        cuts = [self.m * r // world for r in range(world + 1)]
        if self.uneven:  # other cuts each time; some ranks have nothing
            draw = torch.Generator().manual_seed(k)
            cuts = [0, *sorted(torch.randint(0, self.m + 1, (world - 1,), generator=draw).tolist()), self.m]
        return [b - a for a, b in pairwise(cuts)]

    def made(self, world: int) -> tuple[Any, Any]:
        """The loss and the memory: the plain ones for `world` 0, those of several ranks otherwise."""
        loss = LOSSES[self.loss](reduction=self.reduction, exclude=self.exclude)
        same: dict[str, Any] = {"alpha": 0.5, "dtype": self.dtype}
        if world == 0:
            return loss, CrossBatchMemory(self.size, self.dim, self.update, **same)
        ranks = Ranks()
        return GlobalLoss(loss, ranks), MEMORIES[self.mode](self.size, self.dim, self.update, ranks=ranks, **same)


class Played(NamedTuple):
    losses: Tensor  # (steps,)
    gradients: list[Tensor]  # of the rank's own anchors, as a single process would have them
    negatives: list[Tensor]
    state: dict[str, Tensor]  # of the memory
    weights: dict[str, Tensor]  # of the net


def play_embeddings(scene: Scene, world: int) -> Played:
    """The memory and the loss on given embeddings; the mask leaves some out of the memory every third step."""
    loss_fn, memory = scene.made(world)
    rank = dist.get_rank() if world else 0
    losses, gradients, negatives = [], [], []
    for k in range(scene.steps):
        inputs, *rest = scene.batch(k)
        v = F.normalize(inputs[:, : scene.dim].to(scene.dtype))
        if world:
            v, *rest = (x.split(scene.sizes(world, k))[rank] for x in (v, *rest))
        labels, ids, mask = rest
        v = v.clone().requires_grad_()
        memory.enqueue(v.detach(), labels, ids, mask if k % 3 == 2 else None)
        loss, stats = loss_fn(v, labels, memory, ids=ids, return_stats=True)
        loss.backward()
        memory.step()
        losses.append(loss.detach())
        gradients.append(v.grad / max(1, world))
        negatives.append(stats.valid_negatives)
    return Played(torch.stack(losses), gradients, negatives, memory.state_dict(), {})


def play_net(scene: Scene, world: int) -> Played:
    """A small net trained by SGD, in DistributedDataParallel where there are ranks, on the batch and the memory."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, scene.dim))
    model = nn.parallel.DistributedDataParallel(net) if world else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loss_fn, memory = scene.made(world)
    rank = dist.get_rank() if world else 0
    losses = []
    for k in range(scene.steps):
        inputs, labels, ids, _ = scene.batch(k)
        if world:
            inputs, labels, ids = (x.split(scene.sizes(world, k))[rank] for x in (inputs, labels, ids))
        v = F.normalize(model(inputs))
        loss = loss_fn(v, labels, ids=ids)
        memory.enqueue(v.detach(), labels, ids)
        loss = loss + loss_fn(v, labels, memory, ids=ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.step()
        losses.append(loss.detach())
    return Played(torch.stack(losses), [], [], memory.state_dict(), {k: v.detach() for k, v in net.state_dict().items()})


def play_all(play: Callable[[Scene, int], Played], scenes: list[Scene], world: int) -> list[Played]:
    return [play(scene, world) for scene in scenes]


def scenes(**changes: Any) -> list[Scene]:
    """Every update, mode and loss of the paper's three."""
    kinds = product(("queue", "moving_average", "backprop"), MEMORIES, ("contrastive", "triplet", "multi_similarity"))
    return [Scene(update, mode, loss, **changes) for update, mode, loss in kinds]


def joined(parts: list[list[Tensor]]) -> list[Tensor]:
    """The ranks' parts of each step, in the order of the ranks."""
    return [torch.cat(step) for step in zip(*parts)]
