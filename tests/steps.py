"""A small net, a loss between all rows, and comparisons of gradients, for the tests of steps in chunks."""

import torch
import torch.nn.functional as F
from torch import nn


def net(width=16, dim=5, dropout=0.0):
    return nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, dim))


def gradients(*modules):
    return [p.grad.clone() for module in modules for p in module.parameters()]


def forget(*modules):
    for module in modules:
        module.zero_grad()


def in_chunks(model, x, chunk):
    """The plain forward pass, with the random numbers of the chunks."""
    return torch.cat([model(part) for part in x.split(chunk)])


def spread(v):
    """A loss in which every row affects the gradient of every other."""
    return (F.normalize(v) @ F.normalize(v).T).logsumexp(1).mean()


def pair_loss(q, d):
    """Each row of q belongs to the row of d with the same index."""
    return F.cross_entropy(F.normalize(q) @ F.normalize(d).T / 0.1, torch.arange(len(q)))


def close(found, expected, tolerance=1e-6):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
