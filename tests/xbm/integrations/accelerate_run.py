"""Trains with accelerate: `whole`, or `first` the first half and in another process the `rest`."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from tests.xbm.integrations import small
from xbm.integrations.accelerate import register


def train(folder: Path, phase: str, way: str = "register") -> None:
    accelerator, bank = Accelerator(cpu=True), small.memory()
    net = small.net()
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    if way == "register":
        register(accelerator, memory=bank)
    elif way == "register_for_checkpointing":
        accelerator.register_for_checkpointing(bank)
    rank, world = accelerator.process_index, accelerator.num_processes
    suffix = str(rank) if world > 1 else ""
    first, last = {"whole": (0, 12), "first": (0, 6), "rest": (6, 12)}[phase]
    if phase == "rest":
        accelerator.load_state(str(folder / "state"))
    for number in range(first, last):
        batch = [x.roll(-small.BATCH * number, 0)[: small.BATCH].chunk(world)[rank] for x in small.data()]
        accelerator.backward(small.step(model, bank, *batch))
        optimizer.step()
        optimizer.zero_grad()
    if phase == "first":
        accelerator.save_state(str(folder / "state"))
    torch.save({"memory": bank.state_dict(), "model": net.state_dict()}, folder / f"{phase}{suffix}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), *sys.argv[2:])
