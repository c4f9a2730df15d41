"""A finished run as a model to use: `xbm.load(run).embed(images)`."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xbm.errors import InputError
from xbm_app.data.feeds import DecodeFeed, sweep
from xbm_app.data.images import ImageSet, readable
from xbm_app.data.transforms import as_channels, centre_params, cut, fit
from xbm_app.train import task
from xbm_app.train.checkpoint import read_checkpoint
from xbm_app.train.config import Config, from_dict


class Embedder:
    """Turns images into unit vectors with a trained model.

    Attributes:
        config: what the run was trained with.
        classes: names of the training classes.
    """

    def __init__(self, checkpoint: Path, device: str = "auto") -> None:
        self.device = task.pick_device(device)
        state = read_checkpoint(checkpoint, self.device)
        self.config: Config = from_dict(state["config"])
        self.classes: list[str] = state["classes"]
        self.step: int = state["step"]
        # the checkpoint brings all weights: nothing is downloaded or read again
        bare = task.override_weights(self.config)
        self.model = task.model_of(bare)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise InputError(
                f"{checkpoint} does not fit its own config ({str(error).splitlines()[0]}): use another one"
            ) from None
        self.model.to(self.device).eval()
        self.augmentation = task.augmentation_of(self.config, self.model)

    @property
    def dim(self) -> int:
        return self.config.model.dim

    def embed(self, images: Iterable[Image.Image | np.ndarray | str | Path]) -> Tensor:
        """(N, D): unit rows for PIL images, uint8 arrays (H, W) or (H, W, 3), or paths; treated as in testing."""
        opened = [_open(image) for image in images]
        if not opened:
            return torch.zeros(0, self.dim)
        return self.embed_set(_Opened(opened))

    @torch.no_grad()
    def embed_set(self, images: ImageSet, batch_size: int = task.EMBEDDED) -> Tensor:
        """(N, D): the embeddings of a whole set, in its order."""
        feed = DecodeFeed(images, self.augmentation)
        parts = [self.model(batch).float().cpu() for batch, _, _ in sweep(feed, batch_size, device=self.device)]
        return torch.cat(parts) if parts else torch.zeros(0, self.dim)

    def embed_readable(self, images: ImageSet, tell: Callable[[InputError], None]) -> tuple[np.ndarray, Tensor]:
        """The indices (n,) of the images that can be read, and their embeddings (n, D); `tell` is told of the others."""
        read: list[int] = []
        parts = []
        for views, failed in readable(images, self.view, self.decoded_side, task.EMBEDDED):
            for error in failed.values():
                tell(error)
            if views:
                read.extend(views)
                parts.append(self.embed_views(list(views.values())))
        return np.array(read, np.int64), torch.cat(parts) if parts else torch.zeros(0, self.dim)

    @property
    def decoded_side(self) -> int:
        """A JPEG that is going to be embedded need not be decoded larger than this: see `xbm_app.data.store.resized`."""
        return 2 * self.augmentation.resize

    def view(self, image: Image.Image) -> np.ndarray:
        """An opened image, resized as the model needs it.  # (h, w, C) uint8"""
        return as_channels(fit(image, self.augmentation.resize, self.augmentation.mode), self.augmentation.channels)

    def pixels(self, views: Sequence[np.ndarray]) -> Tensor:
        """The windows that the model looks at, normalised.  # (B, C, crop, crop) float32"""
        heights, widths = (torch.tensor([view.shape[axis] for view in views]) for axis in (0, 1))
        return cut(views, centre_params(heights, widths, self.augmentation), self.augmentation)

    @torch.no_grad()
    def embed_views(self, views: Sequence[np.ndarray]) -> Tensor:
        """(B, D): unit rows for what `view` made."""
        return self.model(self.pixels(views).to(self.device)).float().cpu()


class _Opened(ImageSet):
    """Images that are already in memory, of any sizes."""

    def __init__(self, opened: Sequence[Image.Image]) -> None:
        count = len(opened)
        object.__setattr__(self, "_opened", opened)
        super().__init__("images", np.zeros(count, np.int64), ["image"], paths=[f"image {i}" for i in range(count)])

    def open(self, index: int, at_least: int | None = None) -> Image.Image:
        return self._opened[index]  # type: ignore[attr-defined]


def _open(image: Image.Image | np.ndarray | str | Path) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)):
            raise InputError(f"an image array must be uint8 of shape (H, W) or (H, W, 3), not {image.dtype} {image.shape}")
        return Image.fromarray(image).convert("RGB")
    path = Path(image)
    return ImageSet("images", np.zeros(1, np.int64), ["image"], root=path.parent, paths=[path.name]).open(0)


def load(run: str | Path, device: str = "auto") -> Embedder:
    """The model of a run folder: its best checkpoint where one was chosen, otherwise its last."""
    folder = Path(run)
    if folder.is_file():
        return Embedder(folder, device)
    for name in ("best.pt", "last.pt"):
        if (folder / "checkpoints" / name).exists():
            return Embedder(folder / "checkpoints" / name, device)
    raise InputError(f"{folder} holds no checkpoint: give a run folder made by `xbm train`")
