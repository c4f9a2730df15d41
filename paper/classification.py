"""Drift under plain classification (the supplementary's section 3): a trunk trained with cross entropy, no pairs at all.

What is watched are the normalised features at the global pooling layer, of fixed images in eval mode.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xbm_app.data.feeds import Batches
from xbm_app.models import EmbeddingModel, build_model
from xbm_app.train import task
from xbm_app.train.checkpoint import read_checkpoint, write_checkpoint
from xbm_app.train.config import Config
from xbm_app.train.dataset import begin_run, read_run
from xbm_app.train.feature_drift import Drift

LOSS = "cross_entropy"  # loss.name of a config that is classified rather than compared
PROBES = 64


class Pooled(nn.Module):
    """A model seen at its pooling layer."""

    def __init__(self, model: EmbeddingModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.pooled(images)


def classify(config: Config, folder: Path) -> dict[str, Any]:
    """Trains a classifier of the training classes as `config` says, and returns the curves of loss, accuracy and drift.

    Stopped, it goes on from its last checkpoint in `folder`.
    """
    last = folder / "checkpoints" / "last.pt"
    dataset = read_run(config, folder) if last.exists() else begin_run(config, folder)
    device = task.pick_device(config.device)
    torch.manual_seed(config.seed)
    channels = 1 if config.model.trunk == "small" else 3
    model = build_model(config.model.trunk, dataset.train.num_classes, config.model.pooling, config.model.weights, channels).to(
        device, memory_format=torch.channels_last
    )  # type: ignore[call-overload]
    feed = task.feed_of(dataset.train, config, task.augmentation_of(config, model), device)
    sampler = task.sampler_of(dataset.train, config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay)
    probes = np.linspace(0, len(feed) - 1, min(PROBES, len(feed))).astype(np.int64)
    drift = Drift(feed.test(probes).to(device), model.head.in_features, config.log.every).to(device)
    seen, half = Pooled(model), device.type == "cuda"
    tally = torch.zeros(2, device=device)  # loss, accuracy since the last line
    curves: dict[str, list[float | None]] = {name: [] for name in ("step", "lr", "loss", "accuracy")}
    curves |= {f"drift_{delta}": [] for delta in drift.steps}
    start = 0
    if last.exists():
        state = read_checkpoint(last, device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        drift.load_state_dict(state["drift"])
        start, curves, tally = state["step"], state["curves"], state["tally"]

    for step, images, labels, _ in Batches(feed, sampler, start, config.optim.iterations, device=device):
        lr = config.optim.lr * 0.1 ** sum(step >= at for at in config.optim.decay_at)
        for group in optimizer.param_groups:
            group["lr"] = lr
        model.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = model.logits(images)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        tally += torch.stack([loss.detach(), (logits.argmax(1) == labels).float().mean()])
        done = step + 1
        moved = drift(done, seen)
        if done % config.log.every == 0:
            means = (tally / config.log.every).tolist()
            tally.zero_()
            line = {"step": step, "lr": lr, "loss": means[0], "accuracy": means[1]}
            line |= {f"drift_{delta}": float(value) for delta, value in moved.items()}
            for name, values in curves.items():
                values.append(float(f"{line[name]:.4g}") if name in line else None)
        if done % config.log.checkpoint_every == 0 or done == config.optim.iterations:
            state = {"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "curves": curves}
            write_checkpoint(last, {**state, "drift": drift.state_dict(), "tally": tally})
    return {
        "data": {"name": dataset.name, "train_images": len(feed), "train_classes": dataset.train.num_classes},
        "iterations": config.optim.iterations,
        "scores": {},
        "curves": curves,
    }
