"""A pytorch-metric-learning loss with a cross-batch memory. Run: python examples/metric_learning.py"""

import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import CircleLoss
from torch import nn

from xbm import CrossBatchMemory, MetricLearningLoss

torch.manual_seed(0)
labels = torch.arange(1000) % 50
images = torch.randn(50, 32)[labels] + 0.5 * torch.randn(1000, 32)

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
memory, loss_fn = CrossBatchMemory(size=500, dim=16), MetricLearningLoss(CircleLoss())
for step in range(100):
    ids = torch.randint(0, 1000, (32,))
    v = F.normalize(model(images[ids]))
    memory.enqueue(v.detach(), labels[ids], ids)  # ids identify an anchor's own copy
    loss = loss_fn(v, labels[ids], memory, ids=ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 24:
        print(f"step {step + 1}: loss {loss.item():.3f}")
