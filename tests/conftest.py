"""Shared by all tests: one thread per process keeps timing and bits the same everywhere."""

import torch

torch.manual_seed(0)
