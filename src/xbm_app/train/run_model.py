"""The model of a run: built as its config says, and, if its trunk is frozen, the features that it is trained on."""

import copy
import hashlib
import json
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from xbm.distributed import Ranks
from xbm.errors import DamagedFileError, InputError
from xbm_app.data.feeds import Feed, sweep
from xbm_app.data.images import ImageSet, folder_name
from xbm_app.data.store import StoredSet, describe, read_manifest
from xbm_app.data.transforms import Augmentation
from xbm_app.files import MALFORMED, lock, open_in_place, read_arrays, replacing
from xbm_app.models import EmbeddingModel, build_model, freeze, freeze_batch_norm
from xbm_app.models.timm_trunks import PREFIX, usable_side
from xbm_app.progress import track
from xbm_app.train.config import Config

ANY_TRUNK = 64  # pixels: images of this side are large enough for every trunk
EMBED_BATCH = 256  # images per forward pass: scores are bit for bit the same only for the same number
FEATURES = "features"  # the folder, in that of a run, with the features of a frozen trunk


def model_of(config: Config) -> EmbeddingModel:
    chosen, crop, channels = config.model, config.data.crop, 1 if config.model.trunk == "small" else 3
    of_timm = chosen.trunk.startswith(PREFIX)
    if of_timm and (side := usable_side(chosen.trunk, crop)) != crop:
        raise InputError(f"{chosen.trunk} takes no images of data.crop={crop}: set data.crop={side}")
    model = build_model(chosen.trunk, chosen.dim, chosen.pooling, chosen.weights, channels, chosen.head_init, crop)
    if crop < ANY_TRUNK and not of_timm:
        _check_crop(model, config, channels)
    if chosen.freeze_batch_norm:
        freeze_batch_norm(model)
    freeze(model, chosen.freeze)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _check_crop(model: nn.Module, config: Config, channels: int) -> None:
    """Refuses images so small that nothing is left of them within the trunk."""
    crop, shapes = config.data.crop, copy.deepcopy(model).to("meta").eval()  # without values, only shapes can be wrong
    try:
        with torch.no_grad():
            shapes(torch.zeros(1, channels, crop, crop, device="meta"))
    except RuntimeError as error:
        raise InputError(f"data.crop={crop} is too small for {config.model.trunk}: use a larger data.crop") from error


def prepare_trunk(model: EmbeddingModel, config: Config) -> None:
    """Compiles the trunk and lets it recompute its activations, if the config says so."""
    norms = any(isinstance(module, _BatchNorm) and module.training for module in model.train().modules())
    if config.batch.chunk and norms:
        raise InputError("batch.chunk would normalize each chunk by itself: set model.freeze_batch_norm=true, or use a ViT")
    if config.model.checkpointing:
        if norms:
            raise InputError("model.checkpointing would count each batch twice in batch norm: set model.freeze_batch_norm=true")
        recompute: Any = getattr(model.trunk, "set_grad_checkpointing", None)
        if recompute is None:
            raise InputError(
                f"{config.model.trunk} cannot recompute activations: set model.checkpointing=false, or use timm/NAME"
            )
        recompute()
    if config.model.compile:
        model.compile_trunk()


@torch.no_grad()
def features_of(
    model: EmbeddingModel, images: ImageSet, feed: Feed, folder: Path, device: torch.device, ranks: Ranks
) -> Tensor:
    """(N, width) on the device: the pooled features of a set, from the file in `folder` if there is one.

    A file is named after everything that its contents depend on. With several processes the first one computes them.
    """
    path = folder / f"{folder_name(images.name)}-{_features_digest(model, images, feed.augmentation)}.npz"
    features = _read_features(path, len(images))
    if features is None and ranks.first:
        was_training = model.training
        model.eval()
        folder.mkdir(parents=True, exist_ok=True)
        features = _compute_features(model, feed, path.with_suffix(".unfinished"), f"features of {images.name}", device)
        model.train(was_training)
        with replacing(path) as temporary:
            np.savez(temporary, features=features)  # an archive, since it has a checksum
        path.with_suffix(".unfinished").unlink(missing_ok=True)
    ranks.wait()
    features = _read_features(path, len(images)) if features is None else features
    if features is None:
        raise DamagedFileError(path, f"{path} was damaged right after it was written: check the disk, and start again")
    return torch.from_numpy(features).to(device)


def _compute_features(model: EmbeddingModel, feed: Feed, unfinished: Path, what: str, device: torch.device) -> np.ndarray:
    """(N, width), batch by batch. If the process is killed, the next one continues from the file `unfinished`."""
    width = model.head.in_features
    with open(open_in_place(unfinished), "r+b") as file:
        alone = lock(file.fileno())  # otherwise another process is computing the same features
        parts = _whole_batches(file, width) if alone else []
        batches = sweep(feed, EMBED_BATCH, device=device, first=len(parts) * EMBED_BATCH)
        for batch, _, _ in track(batches, what, -(-len(feed) // EMBED_BATCH) - len(parts)):
            parts.append(model.features(batch).float().cpu().numpy())
            if alone:
                content = parts[-1].tobytes()
                file.write(content + zlib.crc32(content).to_bytes(4, "little"))
                file.flush()
    return np.concatenate(parts)


def _whole_batches(file: IO[bytes], width: int) -> list[np.ndarray]:
    """The batches in an unfinished file up to the first that was cut short or damaged, where the file is cut."""
    parts: list[np.ndarray] = []
    size = 4 * width * EMBED_BATCH
    file.seek(0)
    while len(record := file.read(size + 4)) == size + 4:
        content, checksum = record[:size], record[size:]
        if zlib.crc32(content) != int.from_bytes(checksum, "little"):
            break
        parts.append(np.frombuffer(content, np.float32).reshape(-1, width))
    file.seek(file.truncate(len(parts) * (size + 4)))
    return parts


def _read_features(path: Path, count: int) -> np.ndarray | None:
    """The features in a file; None if there is none, or a damaged one."""
    try:
        features = read_arrays(path)["features"]
    except (OSError, *MALFORMED):
        return None
    return features if len(features) == count else None


def _features_digest(model: EmbeddingModel, images: ImageSet, augmentation: Augmentation) -> str:
    """A hash of weights, preprocessing and images."""
    how = (model.pooling, augmentation.resize, augmentation.crop, augmentation.mode, augmentation.interpolation)
    digest = hashlib.sha256(json.dumps([*how, augmentation.mean, augmentation.std, augmentation.channels]).encode())
    for name, value in sorted(model.trunk.state_dict().items()):
        digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    if isinstance(images, StoredSet) and images.store is not None:
        source, where = read_manifest(images.store.path), images.store._where.tolist()
        digest.update(json.dumps([source.sizes, source.times, source.digest, where]).encode())
    else:
        source = describe(images, augmentation.resize, augmentation.mode)
        digest.update(json.dumps([source.paths, source.boxes, source.sizes, source.times, source.digest]).encode())
    return digest.hexdigest()[:16]
