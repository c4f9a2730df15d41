"""The memory in a LightningModule. Run: python examples/lightning_trainer.py

The memory is a submodule, so Lightning moves and saves it. With strategy="ddp", use the classes of `xbm.distributed` and
keep the memory out of the module (`self.__dict__["memory"] = …`): DDP would broadcast its buffers.
"""

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from xbm import ContrastiveLoss, CrossBatchMemory


class Embedder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.memory, self.loss_fn = CrossBatchMemory(size=500, dim=16), ContrastiveLoss(reduction="mean")

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        images, labels, ids = batch
        v = F.normalize(self.net(images))
        self.memory.enqueue(v.detach(), labels, ids)
        return self.loss_fn(v, labels, self.memory, ids=ids)

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch}: loss {self.last:.3f}")

    def on_train_batch_end(self, outputs: dict, *_: object) -> None:
        self.last = float(outputs["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    labels = torch.arange(1000) % 50
    images = torch.randn(50, 32)[labels] + 0.5 * torch.randn(1000, 32)
    loader = DataLoader(TensorDataset(images, labels, torch.arange(1000)), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    model = Embedder()
    trainer.fit(model, loader)
    assert len(model.memory) == 500
