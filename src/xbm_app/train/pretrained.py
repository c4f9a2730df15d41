"""A model to share: a folder with its weights, config and card, or a repository on the hub of Hugging Face."""

import warnings
from dataclasses import replace
from functools import cache
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xbm.errors import InputError
from xbm_app.extras import require
from xbm_app.files import CHECKSUMS, read_json, reading, verify, write_bytes, write_json
from xbm_app.train.config import Config, to_dict
from xbm_app.train.model_card import result_of, write_shared_card

if TYPE_CHECKING:
    from xbm_app.train.load import Embedder

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
FORMAT = 1
ABOUT = ("data", "protocol", "queries", "iterations", "checkpoint", "map@r", "r_precision")  # of result.json, with the recalls


def write(embedder: "Embedder", folder: Path) -> None:
    """Writes weights, config and card. The config names no folder or file of this machine."""
    from safetensors.torch import save

    result = embedder.result if embedder.result is not None else result_of(embedder.checkpoint)
    kept = {name: value for name, value in result.items() if name in ABOUT or name.startswith("recall@")}
    described = {
        "format": FORMAT,
        "config": to_dict(without_paths(embedder.config)),
        "classes": embedder.classes,
        "step": embedder.step,
        "result": kept,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in embedder.model.state_dict().items()}
    write_bytes(folder / WEIGHTS, save(tensors, {"format": "pt"}), checksum=True)
    write_json(folder / CONFIG, described, checksum=True)
    write_bytes(folder / CARD, write_shared_card(embedder, kept).encode())


def without_paths(config: Config) -> Config:
    """A config to show to others: without the places of data, and with the bare name of a file of initial weights."""
    data = replace(config.data, root=None, store=None, features=None)
    return replace(config, data=data, model=replace(config.model, weights=Path(config.model.weights).name))


def read(folder: Path, device: torch.device) -> dict[str, Any]:
    """What `write` wrote, with the keys of a checkpoint."""
    require("hub", "safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with reading(folder / CONFIG):
        described = read_json(folder / CONFIG)
        if int(described["format"]) > FORMAT:
            raise InputError(f"{folder} has format {described['format']}, but this version reads up to {FORMAT}: upgrade xbm")
    with reading(folder / WEIGHTS):
        try:
            return {**described, "model": load_file(verify(folder / WEIGHTS), device=str(device))}
        except SafetensorError as error:
            raise ValueError(error) from error


@cache
def hub_model() -> Any:
    """The class through which huggingface_hub saves, finds and uploads a model. The package is imported on first use."""
    require("hub", "huggingface_hub", "safetensors")
    with warnings.catch_warnings(action="ignore"):  # in a notebook, of tqdm about its own widgets
        from huggingface_hub import ModelHubMixin, snapshot_download

    class HubModel(ModelHubMixin):
        def __init__(self, embedder: "Embedder") -> None:
            self.embedder = embedder

        def _save_pretrained(self, save_directory: Path) -> None:
            write(self.embedder, save_directory)

        @classmethod
        def _from_pretrained(
            cls,
            *,
            model_id: str,
            revision: str | None,
            cache_dir: str | Path | None,
            force_download: bool,
            local_files_only: bool,
            token: str | bool | None,
            device: str = "auto",
            **_: object,
        ) -> "HubModel":
            found = snapshot_download(
                model_id, revision=revision, cache_dir=cache_dir, force_download=force_download, token=token,
                local_files_only=local_files_only, allow_patterns=[WEIGHTS, CONFIG, CHECKSUMS],
            )  # fmt: skip
            return cls(_open(Path(found), device))

    return HubModel


def from_pretrained(name: str | Path, device: str = "auto", **options: Any) -> "Embedder":
    """Loads a model that `save_pretrained` or `push_to_hub` wrote.

    Args:
        name: a folder, or the name of a repository on the hub, such as "user/name".
        device: "auto", "cpu", "cuda", ...
        options: those of huggingface_hub: `revision`, `token`, `cache_dir`, `force_download`, `local_files_only`.

    Example:
        >>> model = from_pretrained("user/name")  # doctest: +SKIP
        >>> model.embed(["photo.jpg"]).shape  # doctest: +SKIP
        torch.Size([1, 512])
    """
    if (folder := Path(name).expanduser()).is_dir():
        return _open(folder, device)
    model = hub_model()
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return model.from_pretrained(str(name), device=device, **options).embedder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise InputError(
            f"{name} is no folder, and the hub has no model of that name or does not answer: pass a folder that "
            "`save_pretrained` wrote, or user/name"
        ) from error
    except JSONDecodeError as error:
        raise InputError(f"{name} has a {CONFIG} that cannot be read: it is not a model of xbm") from error


def _open(folder: Path, device: str) -> "Embedder":
    from xbm_app.train.load import Embedder

    if not (folder / WEIGHTS).exists():
        raise InputError(f"{folder} holds no {WEIGHTS}: pass a folder that `save_pretrained` wrote, or a run to `xbm.load`")
    return Embedder(folder / WEIGHTS, device)
