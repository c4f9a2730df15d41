"""An encoder of the user's own, named as `module:object`, in the place of a trained run."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.decoding import fit

SIDE = 512  # pixels of the shorter side of what the encoder gets


class OwnEncoder:
    """Calls a function of the user's own: a list of RGB images, whose shorter side is `SIDE` pixels → an array (n, D).

    If the object has a method `encode_text`, which takes a list of texts, the index can be searched by text as well. A class is
    called without arguments first. What it returns is scaled to unit length.

    Args:
        name: `module:object`; the module is imported from the current folder or the installed packages.

    Raises:
        InputError: there is no such object, or it cannot be called.
    """

    decoded_side = 2 * SIDE

    def __init__(self, name: str) -> None:
        module, _, attribute = name.partition(":")
        if not module or not attribute:
            raise InputError(f"--encoder takes module:object, such as clip_encoder:Encoder, got {name!r}")
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module.split(".")[0] and error.name != module:
                raise
            raise InputError(f"there is no module {module!r}: run the command in its folder, or install it") from None
        for part in attribute.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type):
            found = found()
        if not callable(found):
            raise InputError(f"{name} is not a function or class: name what embeds a list of images")
        self.name, self._encode = name, found
        self._encode_text: Callable[[list[str]], Any] | None = getattr(found, "encode_text", None)

    @property
    def reads_text(self) -> bool:
        return self._encode_text is not None

    def view(self, image: Image.Image) -> np.ndarray:
        return fit(image.convert("RGB"), SIDE, "shorter")

    def embed_views(self, views: Sequence[np.ndarray]) -> torch.Tensor:
        """(n, D): unit rows."""
        return self._rows(self._encode([Image.fromarray(view) for view in views]), len(views))

    def embed_text(self, texts: Sequence[str]) -> torch.Tensor:
        """(n, D): unit rows.

        Raises:
            InputError: the encoder does not read text.
        """
        if self._encode_text is None:
            raise InputError(f"{self.name} has no method encode_text: search by image, or add one that takes a list of texts")
        return self._rows(self._encode_text(list(texts)), len(texts))

    def _rows(self, returned: Any, count: int) -> torch.Tensor:
        rows = torch.as_tensor(returned.detach().cpu() if isinstance(returned, torch.Tensor) else np.asarray(returned)).float()
        if rows.dim() != 2 or len(rows) != count:
            raise InputError(f"{self.name} must return an array ({count}, D) for {count} inputs, got {tuple(rows.shape)}")
        length = rows.norm(dim=1, keepdim=True)
        if not bool((torch.isfinite(length) & (length > 0)).all()):
            raise InputError(f"{self.name} returned a vector that is zero or not finite: correct it before indexing")
        return rows / length
