"""A cross-batch memory in a plain PyTorch loop: three extra lines. Run: python examples/plain_pytorch.py"""

import torch
import torch.nn.functional as F
from torch import nn

from xbm import ContrastiveLoss, CrossBatchMemory

torch.manual_seed(0)
CLASSES, IMAGES = 50, 1000
centers = torch.randn(CLASSES, 32)
labels = torch.arange(IMAGES) % CLASSES
images = centers[labels] + 0.5 * torch.randn(IMAGES, 32)

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
memory, loss_fn = CrossBatchMemory(size=500, dim=16), ContrastiveLoss(reduction="mean")
for step in range(200):
    ids = torch.randint(0, IMAGES, (32,))
    v = F.normalize(model(images[ids]))
    memory.enqueue(v.detach(), labels[ids], ids)
    loss = loss_fn(v, labels[ids], memory, ids=ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}")
