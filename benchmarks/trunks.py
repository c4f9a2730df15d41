"""Does every family of trunks work from training to index? Generates docs/trunks.md.

Ten models of timm, randomly initialized, on a folder of generated pictures: train, resume, evaluate, export, index.

python -m benchmarks.trunks           # measures, a few minutes on 2 cores, and writes benchmarks/results/cpu-trunks.json
python -m benchmarks.trunks --page    # writes the page only
"""

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.frozen_trunk import section
from benchmarks.gpu_page import table
from xbm_app.data.images import image_files
from xbm_app.export import TOLERANCE, export_run
from xbm_app.files import read_checkpoint
from xbm_app.models import build_model
from xbm_app.models.embedding import layers_of
from xbm_app.models.timm_trunks import timm_input
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import update
from xbm_app.train.config import Config, override
from xbm_app.train.load import evaluate_run
from xbm_app.train.loop import train
from xbm_app.train.presets import preset, small_image_settings
from xbm_app.train.trials import CANDIDATES, FEWEST_CLASSES, HELD_OUT, MODERN, MOST, SHARE, WARM_UP

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-trunks.json"
PAGE = ROOT / "docs" / "trunks.md"

FAMILIES = {
    "ResNet": "timm/resnet10t.c3_in1k",
    "ConvNeXt": "timm/convnext_atto.d2_in1k",
    "EfficientNet": "timm/efficientnet_b0.ra_in1k",
    "MobileNet": "timm/mobilenetv3_small_050.lamb_in1k",
    "ViT": "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "DINOv2": "timm/vit_small_patch14_dinov2.lvd142m",
    "Swin": "timm/swin_tiny_patch4_window7_224.ms_in1k",
    "CLIP image tower": "timm/vit_xsmall_patch16_clip_224.tinyclip_yfcc15m",
    "SigLIP image tower": "timm/vit_base_patch16_siglip_224.webli",
    "MobileViT": "timm/mobilevit_xxs.cvnets_in1k",
}
TIED = 1e-6
SIDE = 64  # of the generated pictures
SHORT = {
    "model.weights": "none", "model.dim": 16, "device": "cpu", "batch.size": 4, "batch.per_class": 2, "optim.iterations": 4,
    "optim.decay_at": (), "optim.name": "adamw", "optim.warmup": 2, "log.every": 2, "log.checkpoint_every": 4,
}  # fmt: skip


def draw_pictures(root: Path, classes: int = 6, each: int = 3) -> Path:
    """A folder of class folders; each class is a pattern, each picture a noisy view of it."""
    draw = np.random.default_rng(0)
    for label in range(classes):
        pattern = draw.integers(0, 256, (SIDE, SIDE, 3))
        (root / f"class_{label}").mkdir(parents=True)
        for number in range(each):
            view = np.clip(pattern + draw.normal(0, 40, pattern.shape), 0, 255).astype(np.uint8)
            Image.fromarray(view).save(root / f"class_{label}" / f"{number}.png")
    return root


def config_of(trunk: str, pictures: Path) -> Config:
    """What `xbm train --data DIR --trunk NAME` chooses for these pictures, for a few iterations from scratch."""
    chosen = override(preset("own", trunk=trunk, recipe="auto", weights="none"), {**SHORT, "data.root": str(pictures)})
    return override(chosen, small_image_settings(chosen, SIDE))


def check_trunk(trunk: str, folder: Path) -> dict[str, Any]:
    """Trains, resumes, evaluates, exports and indexes, and returns what that took and whether it is exact."""
    pictures, start = draw_pictures(folder / "pictures"), time.perf_counter()
    config = config_of(trunk, pictures)
    result = train(config, folder / "whole", quiet=True)
    half = config.optim.iterations // 2
    train(override(config, {"optim.iterations": half}), folder / "parts", quiet=True)
    train(config, folder / "parts", resume=True, quiet=True)
    states = [read_checkpoint(folder / run / "checkpoints" / "last.pt") for run in ("whole", "parts")]
    exported = export_run(folder / "whole", folder / "export")
    update(folder / "whole", pictures, folder / "index", _fail, quiet=True)
    searcher = Searcher(folder / "index")
    paths = image_files(pictures)
    found = []
    for path in paths:  # nets without training may embed two pictures alike: then either comes first
        hits = searcher.search(searcher.embed(searcher.open(pictures / path)), len(paths))
        found.append(next(hit.similarity for hit in hits if hit.path == path) >= hits[0].similarity - TIED)
    model = build_model(trunk, 16, "own", "none", side=config.data.crop)
    return {
        "trunk": trunk,
        "own_side": timm_input(trunk).side,
        "side_of_photographs": preset("own", trunk=trunk).data.crop,
        "side": config.data.crop,
        "interpolation": config.data.interpolation,
        "width": model.head.in_features,
        "parameters": sum(p.numel() for p in model.trunk.parameters()),
        "layers": len(layers_of(model.trunk)),
        "resampled": hasattr(model.trunk, "set_input_size") and config.data.crop != timm_input(trunk).side,
        "resumes": same(*states),
        "evaluates": evaluate_run(folder / "whole")["protocols"] == result["protocols"],
        "onnx": exported.difference["model.onnx"],
        "indexed": sum(found) / len(paths),
        "seconds": round(time.perf_counter() - start, 1),
    }


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints are equal, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))


def _fail(error: Exception) -> None:
    raise error


RATES = " and ".join(f"{settings['optim.lr']:g}" for settings in CANDIDATES.values() if settings)
HEAD = f"""# Which trunks can I train?

Any model of timm: `xbm train --data DIR --trunk timm/NAME`. Mean, standard deviation, interpolation, pooling and the size of
the images are those that timm states for the model, and transformers adapt to other sizes.

- **Size.** Photographs are cropped to the size that the model was trained with; models trained on more than 384 pixels start at
  224. If most images are small, the crop is at most twice their size with pretrained weights, and their own size without. A
  size that the model cannot take is replaced by the nearest one that it can; one that you set yourself with `data.crop` is
  refused with a sentence that names that size.
- **Position embeddings** are resampled once, when the model is built, after its weights are loaded. So training and exported
  models do no extra work.
- **Pooling.** `model.pooling=own` is the model's: a class token, attention pooling, or an average with its normalization. The
  paper's `average` and its code's `max` remain available where the model returns a map or tokens.
- **Speed.** All models run channels-last; timm's transformers use PyTorch's scaled dot-product attention. On request:
  `model.compile=true` (torch.compile), `model.checkpointing=true` (recompute activations), `batch.chunk=64` (batches of
  thousands, embedded 64 at a time). The last two need a trunk without batch normalization, or `model.freeze_batch_norm=true`.
- **Less to train.** `model.freeze=blocks:6` freezes the stem and the first six blocks, whose backward pass is skipped;
  `model.freeze=trunk` trains only the head, on features that are computed once, without augmentation.

## How are transformers trained?

For a pretrained transformer, `auto` chooses how to train on your data. It trains with each of these in turn, on
{100 - 100 * HELD_OUT:.0f} % of the training classes for a fifth of the iterations (at most {MOST:,}), and takes the one
with the highest MAP@R on the other {100 * HELD_OUT:.0f} %. The test classes are not looked at. The run then trains on all
training classes.

- **AdamW**, at the learning rates {RATES} (two candidates): weight decay {MODERN["optim.weight_decay"]} except for norms and
  biases, a linear warm-up in the first {100 / WARM_UP:.0f} %, then cosine, gradients clipped at norm {MODERN["optim.clip"]:g}.
  The rate is that of the head; each layer of the trunk has {MODERN["optim.layer_decay"]} times the rate of the next one.
- **Adam**, as the preset has it for all other trunks (`preset`).

What to know about it:

- **Recorded** in `RUN/trials.json`: every candidate with its scores. `config.yaml` has the settings that were chosen.
- **Cost**: {len(CANDIDATES)} × {100 / SHARE:.0f} % of the iterations of the run. A run that is stopped meanwhile continues with
  `--resume`.
- **Omitted** if you set the optimizer yourself (any `optim` setting but `optim.iterations`, `optim.precision` and
  `optim.ema`, or `model.trunk_lr`), with `model.freeze=trunk`, and with `--config`. With fewer than {FEWEST_CLASSES} training
  classes, the first candidate is used.
- **Not measured by us.** The candidates are what fine-tuning transformers usually takes. No figures of ours compare them, and
  short runs may prefer a higher rate than long ones.

"""


def page() -> str:
    results = json.loads(RESULTS.read_text())
    rows = []
    for family, r in results["trunks"].items():
        needed = [f"{r['own_side']} → {r['side_of_photographs']} px" if r["own_side"] != r["side_of_photographs"] else ""]
        needed += [f"{SIDE} → {r['side']} px" if r["side"] != SIDE else ""]
        needed += ["positions resampled" if r["resampled"] else ""]
        rows.append([
            family, f"`{r['trunk']}`", f"{r['parameters'] / 1e6:.1f} M", str(r["layers"]), str(r["width"]),
            f"{r['side_of_photographs']}", "; ".join(each for each in needed if each) or "nothing",
            "yes" if r["resumes"] else "no", "yes" if r["evaluates"] else "no", f"{r['onnx']:.0e}", f"{r['indexed']:.0%}",
        ])  # fmt: skip
    head = ["family", "trunk", "parameters", "layers", "width", "crop", "needed", "resumes", "evaluates", "ONNX", "index"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{HEAD}{section()}## What did each family need?\n\n"
        f"Randomly initialized, {SHORT['optim.iterations']} iterations on a folder of generated pictures of {SIDE}\n"
        f"pixels, on a CPU ({versions}). `python -m benchmarks.trunks` measures\nthis and writes this page.\n\n"
        f"{table(head, rows)}\n"
        "- **layers**: the stem, the blocks and what follows them, as `model.freeze` and `optim.layer_decay` count them.\n"
        "- **crop**: for photographs, in pixels.\n"
        f"- **needed**: what was changed automatically; {SIDE} is the size of the pictures.\n"
        "- **resumes**: a run that is stopped half-way ends with the same checkpoint, bit for bit.\n"
        "- **evaluates**: `xbm evaluate` returns the same scores as the run.\n"
        f"- **ONNX**: largest difference between the exported model and the run (limit: {TOLERANCE:.0e}).\n"
        "- **index**: share of the indexed pictures that a search for them returns first, or tied with the first.\n"
    )


def main() -> None:
    if "--page" not in sys.argv:
        import timm

        torch.set_num_threads(1)
        trunks = {}
        for family, trunk in FAMILIES.items():
            with TemporaryDirectory() as folder:
                trunks[family] = check_trunk(trunk, Path(folder))
            print(json.dumps(trunks[family]), flush=True)
        versions = {"torch": torch.__version__, "timm": timm.__version__}
        RESULTS.write_text(
            json.dumps({"date": time.strftime("%Y-%m-%d"), "versions": versions, "trunks": trunks}, indent=1) + "\n"
        )
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
