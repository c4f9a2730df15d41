"""Trains with lightning: `whole`, or `first` the first half and in another process the `rest`."""

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.xbm.integrations import small
from xbm import ContrastiveLoss
from xbm.distributed import GlobalLoss, ShardedMemory
from xbm.integrations.lightning import MemoryCallback


class Embedder(lightning.LightningModule):
    """The memory is outside; with several processes also a sharded one, which exists only once there is a process group."""

    def __init__(self, bank: Any) -> None:
        super().__init__()
        self.net, self.bank = small.net(), [bank]  # in a list, it is no submodule

    def setup(self, stage: str) -> None:
        if dist.is_initialized():
            self.__dict__["sharded"] = ShardedMemory(small.SIZE, small.DIM)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = small.step(self.net, self.bank[0], *batch)
        if dist.is_initialized():
            loss = loss + small.step(self.net, self.sharded, *batch, loss_fn=GlobalLoss(ContrastiveLoss(margin=-0.5)))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def train(folder: Path, phase: str) -> None:
    lightning.seed_everything(0, verbose=False)
    several = "RANK" in os.environ
    bank = small.memory()
    dataset = TensorDataset(*small.data())
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    sampler = DistributedSampler(dataset, world, rank, shuffle=False)
    saves = ModelCheckpoint(dirpath=folder / phase, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=2 if phase == "first" else 4, accelerator="cpu", devices=world, strategy="ddp" if several else "auto",
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        use_distributed_sampler=False, callbacks=[MemoryCallback(*(["sharded"] if several else []), memory=bank), saves],
    )  # fmt: skip
    module = Embedder(bank)
    loader = DataLoader(dataset, batch_size=small.BATCH // world, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=folder / "first" / "epoch=1.ckpt" if phase == "rest" else None)
    end = {"memory": bank.state_dict(), "model": module.net.state_dict()}
    if several:
        end["sharded"] = module.sharded.shard.state_dict()
    torch.save(end, folder / (f"{phase}{rank}.pt" if several else f"{phase}.pt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), sys.argv[2])
