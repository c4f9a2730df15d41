"""The same loop on several processes. Run: torchrun --nproc-per-node 2 examples/several_processes.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from xbm import ContrastiveLoss
from xbm.distributed import GlobalLoss, ShardedMemory  # or ReplicatedMemory

dist.init_process_group("gloo")  # on GPUs: "cpu:gloo,cuda:nccl"
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
CLASSES, IMAGES = 50, 1000
centers = torch.randn(CLASSES, 32)
labels = torch.arange(IMAGES) % CLASSES
images = centers[labels] + 0.5 * torch.randn(IMAGES, 32)

model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
memory, loss_fn = ShardedMemory(size=500, dim=16), GlobalLoss(ContrastiveLoss(reduction="mean"))  # outside DDP
for step in range(200):
    ids = torch.randint(0, IMAGES, (32,)).chunk(world)[rank]  # the same draw on every rank; each takes its share
    v = F.normalize(model(images[ids]))
    memory.enqueue(v.detach(), labels[ids], ids)
    loss = loss_fn(v, labels[ids], memory, ids=ids)  # the loss of the global batch
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49 and rank == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}")
dist.destroy_process_group()
