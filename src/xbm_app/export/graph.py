"""What is exported: pixels in, points on the unit sphere out, with everything between them inside."""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from xbm_app.data.transforms import normalisation
from xbm_app.train.load import Embedder


class Portable(nn.Module):
    """A model that takes bytes: normalisation of the pixels at its start, of the embedding at its end."""

    offset: Tensor  # (C, 1, 1)
    gain: Tensor

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.model = copy.deepcopy(embedder.model).to("cpu", memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
        offset, gain = (torch.from_numpy(each)[:, None, None] for each in normalisation(embedder.augmentation))
        self.register_buffer("offset", offset)
        self.register_buffer("gain", gain)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embeddings.

        Args:
            pixels: (B, C, crop, crop) uint8.

        Returns:
            (B, D) float32, rows of unit length.
        """
        return self.model((pixels.float() - self.offset) * self.gain)


def windows(embedder: Embedder, views: list[np.ndarray]) -> np.ndarray:
    """The part of resized images that the model looks at, as the exported model takes it.  # (B, C, crop, crop) uint8"""
    crop = embedder.augmentation.crop
    cut = []
    for view in views:
        top, left = (view.shape[0] - crop) // 2, (view.shape[1] - crop) // 2
        cut.append(view[top : top + crop, left : left + crop].transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(cut))
