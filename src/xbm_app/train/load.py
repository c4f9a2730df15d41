"""A trained model to use: `xbm.load(run).embed(images)`; and its scores by the data set's own protocol."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import DamagedFileError, InputError
from xbm.retrieval import score as score_protocol
from xbm_app.data.decoding import fit
from xbm_app.data.feeds import DecodeFeed, sweep
from xbm_app.data.images import ImageSet, Protocol, readable
from xbm_app.data.own_data import whole_path
from xbm_app.data.transforms import as_channels, centre_params, cut
from xbm_app.files import read_checkpoint, reading
from xbm_app.train.config import Config, from_dict, override
from xbm_app.train.dataset import augmentation_of, read_run
from xbm_app.train.run_model import EMBED_BATCH, model_of
from xbm_app.train.state import pick_device

Scores = dict[str, dict[str, float]]  # by protocol and metric


class Embedder:
    """Turns images into unit vectors with a trained model.

    Attributes:
        checkpoint: the file that the weights come from.
        config: what the run was trained with.
        classes: names of the training classes.
        step: iterations trained.
    """

    def __init__(self, checkpoint: Path, device: str = "auto") -> None:
        self.checkpoint, self.device = checkpoint, pick_device(device)
        state = read_checkpoint(checkpoint, self.device)
        with reading(checkpoint):
            self.config: Config = from_dict(state["config"])
            self.classes: list[str] = state["classes"]
            self.step = int(state["step"])
            stored = {name: tensor.shape for name, tensor in state["model"].items()}
        # the checkpoint has all weights: pretrained ones need not be downloaded or read
        self.model = model_of(override(self.config, {"model.weights": "none"}))
        expected = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        if expected != stored:
            name = next(name for name in {**expected, **stored} if expected.get(name) != stored.get(name))
            raise DamagedFileError(checkpoint, f"{checkpoint} does not fit its own config ({name}): use another checkpoint")
        self.model.load_state_dict(state["model"])
        self.model.to(self.device).eval()
        self.augmentation = augmentation_of(self.config, self.model)

    @property
    def dim(self) -> int:
        return self.config.model.dim

    def embed(self, images: Iterable[Image.Image | np.ndarray | str | Path]) -> Tensor:
        """(N, D): unit rows for PIL images, uint8 arrays (H, W) or (H, W, 3), or paths; preprocessed as in testing."""
        opened = [_open(image) for image in images]
        if not opened:
            return torch.zeros(0, self.dim)
        names = [f"image {number}" for number in range(len(opened))]
        return self.embed_set(_Opened("images", np.zeros(len(opened), np.int64), ["image"], paths=names, opened=opened))

    @torch.no_grad()
    def embed_set(self, images: ImageSet, batch_size: int = EMBED_BATCH) -> Tensor:
        """(N, D): the embeddings of a whole set, in its order."""
        feed = DecodeFeed(images, self.augmentation)
        parts = [self._checked(self.model(batch)) for batch, _, _ in sweep(feed, batch_size, device=self.device)]
        return torch.cat(parts) if parts else torch.zeros(0, self.dim)

    def embed_readable(self, images: ImageSet, report: Callable[[InputError], None]) -> tuple[np.ndarray, Tensor]:
        """The indices (n,) of the images that can be read, and their embeddings (n, D); `report` gets the other errors."""
        indices: list[int] = []
        parts = []
        for views, failed in readable(images, self.view, self.decoded_side, EMBED_BATCH):
            for error in failed.values():
                report(error)
            if views:
                indices.extend(views)
                parts.append(self.embed_views(list(views.values())))
        return np.array(indices, np.int64), torch.cat(parts) if parts else torch.zeros(0, self.dim)

    @property
    def decoded_side(self) -> int:
        """The largest side at which a JPEG needs to be decoded before it is embedded: see `xbm_app.data.store.resized`."""
        return 2 * self.augmentation.resize

    def view(self, image: Image.Image) -> np.ndarray:
        """Resizes an image as the model needs it.  # (h, w, C) uint8"""
        how = self.augmentation
        return as_channels(fit(image, how.resize, how.mode, how.interpolation), how.channels)

    def pixels(self, views: Sequence[np.ndarray]) -> Tensor:
        """Center crops, normalized: the model's input.  # (B, C, crop, crop) float32"""
        heights, widths = (torch.tensor([view.shape[axis] for view in views]) for axis in (0, 1))
        return cut(views, centre_params(heights, widths, self.augmentation), self.augmentation)

    @torch.no_grad()
    def embed_views(self, views: Sequence[np.ndarray]) -> Tensor:
        """(B, D): unit rows for images resized by `view`."""
        return self._checked(self.model(self.pixels(views).to(self.device)))

    def _checked(self, vectors: Tensor) -> Tensor:
        vectors = vectors.float().cpu()
        if not bool(vectors.isfinite().all()):
            raise InputError(
                f"the model in {self.checkpoint} gives NaN or infinity, so it has diverged: use another checkpoint"
            )
        return vectors


@dataclass(frozen=True, eq=False)
class _Opened(ImageSet):
    """Images that are already in memory, of any sizes."""

    opened: Sequence[Image.Image] = ()

    def open(self, index: int, at_least: int | None = None) -> Image.Image:
        return self.opened[index]


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
    """Loads a trained model.

    Args:
        run: a run folder, or one of the checkpoints in it. Of a folder it is `best.pt`, the checkpoint with the best score on
            held-out classes, if the run was trained with `log.evaluate_every`; otherwise `last.pt`. The scores that
            `xbm train` prints are those of the same checkpoint.
        device: "auto", "cpu", "cuda", ...
    """
    folder = Path(run)
    if folder.is_file():
        return Embedder(folder, device)
    for name in ("best.pt", "last.pt"):
        if (folder / "checkpoints" / name).exists():
            return Embedder(folder / "checkpoints" / name, device)
    raise InputError(f"{folder} holds no checkpoint: pass a run folder created by `xbm train`")


def score_protocols(
    protocols: Iterable[Protocol], embed: Callable[[ImageSet], Tensor], ranks: Ranks | None = None
) -> tuple[Scores, dict[int, Tensor]]:
    """Embeds every image set once and scores every protocol; returns the scores and the embeddings by `id(image_set)`."""
    embeddings: dict[int, Tensor] = {}
    scores = {}
    for protocol in protocols:
        for images in (protocol.query, protocol.gallery):
            if images is not None and id(images) not in embeddings:
                embeddings[id(images)] = embed(images)
        gallery = None if protocol.gallery is None else embeddings[id(protocol.gallery)]
        scores[protocol.name] = score_protocol(protocol, embeddings[id(protocol.query)], gallery, ranks)
    return scores, embeddings


def evaluate_run(folder: Path, root: Path | None = None) -> dict[str, Any]:
    """Scores a run by every protocol of its data set.

    Args:
        folder: a run folder, or one of the checkpoints in it: see `load`.
        root: where the data is now, if it has moved.
    """
    model = load(folder)
    config = model.config
    if root is not None:
        config = replace(config, data=replace(config.data, root=whole_path(root)))
    dataset = read_run(config, folder.parents[1] if folder.is_file() else folder)
    scores, _ = score_protocols(dataset.protocols, model.embed_set)
    first = dataset.protocols[0].name
    return {
        **scores[first],
        "protocol": first,
        "protocols": scores,
        "checkpoint": model.checkpoint.name,
        "checkpoint_iterations": model.step,
        "iterations": model.step,
    }
