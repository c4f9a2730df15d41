"""Made-up runs that look like real ones: glyph thumbnails, losses that fall, counts that span decades."""

import math
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from xbm_app.report.groups import Doubtful, Match, Mined, Query, RunView, Trace

LOOK_ALIKES = [
    "ОQΘÖØD",
    "ЕFЁΞÉÈ",
    "КЖXχxҚ",
    "НИЙMNП",
    "АΛΔÀÄÅ",
    "BВ8ßЬЪ",
    "SЅ5$Ș§",
    "ΨΦφψУY",
    "TГТ7ŤŢ",
    "UЏЦŲŮV",
    "gǵğ9qр",
    "aαдаãă",
]
FACES = ["DejaVuSans", "DejaVuSerif", "DejaVuSans-Bold", "DejaVuSerif-Italic", "DejaVuSansMono", "DejaVuSerif-Bold"]


@cache
def glyph(character: str, style: int, side: int = 32) -> np.ndarray:
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(str(folder / f"{FACES[style % len(FACES)]}.ttf"), 22)
    image = Image.new("L", (side, side), 255)
    ImageDraw.Draw(image).text((side / 2, side / 2), character, font=font, fill=20, anchor="mm")
    return np.asarray(image.rotate((style * 37) % 21 - 10, fillcolor=255))


def queries(rng: np.random.Generator, accuracy: float, count: int) -> list[Query]:
    made = []
    for i in range(count):
        family = LOOK_ALIKES[i % len(LOOK_ALIKES)]
        own = family[(i // len(LOOK_ALIKES)) % len(family)]
        similarity = 0.97 - np.cumsum(rng.uniform(0.005, 0.05, 8))
        right = rng.random(8) < accuracy - 0.04 * np.arange(8)
        results = [
            Match(glyph(own if ok else family[rng.integers(1, len(family))], int(rng.integers(9))), float(s), bool(ok))
            for ok, s in zip(right, similarity)
        ]
        made.append(Query(f"glyph {i}", glyph(own, i), results))
    return made


def mined(rng: np.random.Generator, count: int) -> list[Mined]:
    made = []
    for i in range(count):
        family = LOOK_ALIKES[i % len(LOOK_ALIKES)]
        far = [Match(glyph(LOOK_ALIKES[(i + 3 + j) % 12][j], j), 0.62 - 0.05 * j) for j in range(i % 4)]
        near = [Match(glyph(family[1 + j % 5], j), float(0.93 - 0.035 * j)) for j in range(8)]
        made.append(Mined(glyph(family[0], i), glyph(family[0], i + 1), far, near))
    return made


def doubtful(count: int) -> list[Doubtful]:
    made = []
    for i in range(count):
        own, other = LOOK_ALIKES[i % len(LOOK_ALIKES)][:2]
        alike = [[Match(glyph(each, j), 0.9 - 0.04 * j) for j in range(1, 5)] for each in (own, other)]
        made.append(Doubtful(f"glyph {i}", glyph(other, i), f"{own}, a class with a rather long name", f"{other}", *alike))
    return made


def trace(rng: np.random.Generator, memory: bool, final: float, steps: int = 1500, collapsed: bool = False) -> Trace:
    step = np.arange(10, steps + 1, 10)
    t = step / steps
    drift = {}
    for delta, height in ((10, 0.11), (100, 0.55), (1000, 1.05)):
        curve = height * (0.18 + np.exp(-4 * t)) * rng.normal(1, 0.06, len(step)) * (2.4 if collapsed else 1)
        drift[f"drift_{delta}"] = np.where(step > delta, np.minimum(curve, 2.4), np.nan)
    found = (2600 if collapsed else 900) * (0.5 + np.exp(-3 * t)) * rng.normal(1, 0.08, len(step))
    return Trace(
        step=step,
        loss=(3 if memory else 1) * (0.12 + 0.6 * np.exp(-5 * t)) * rng.normal(1, 0.07, len(step)) * (4 if collapsed else 1),
        valid_negatives_batch=np.maximum(0, 60 * np.exp(-6 * t) + rng.normal(1.6, 1.4, len(step))),
        valid_negatives_memory=np.where(step > 100, found, np.nan) if memory else np.empty(0),
        **drift,
        evaluations=[(k, final * (1 - 0.8 * math.exp(-4 * k / steps))) for k in range(250, steps + 1, 250)],
    )


def run(
    loss: str, memory: bool, seed: int, recall: float, reduction: str = "mean", pictures: int = 12, collapsed: bool = False
) -> RunView:
    rng = np.random.default_rng([seed, memory, len(loss), len(reduction)])
    curve = [1 - (1 - recall) * k**-0.62 for k in range(1, 33)]
    setting = ", ".join(part for part in (loss, reduction, "with memory" if memory else "without memory") if part)
    return RunView(
        name=f"{loss}-{'memory' if memory else 'baseline'}-{seed}",
        group=setting,
        loss=loss,
        reduction=reduction,
        memory=memory,
        seed=seed,
        recall={"map@r": recall * 0.62, **{f"recall@{k}": curve[k - 1] for k in (1, 2, 4, 8)}},
        curve=curve,
        seconds=(61.0 if memory else 52.0) + float(rng.normal(0, 0.8)),
        iterations=1500,
        trace=trace(rng, memory, recall, collapsed=collapsed),
        queries=queries(rng, recall, pictures),
        chosen=f"{pictures} queries drawn at random, the same for every run.",
        mined=mined(rng, pictures) if memory else [],
        doubtful=doubtful(pictures) if memory else [],
        notes=[("warning", "Embeddings are collapsing (mean cosine 0.97): try reduction=mean or a lower learning rate.")]
        if collapsed
        else [],
        data="glyphs, 180 unseen classes, 2,880 images",
        config={
            "batch": "32 = 8 classes × 4",
            "embedding": "64-d",
            "learning rate": "1e-3",
            "warm-up": "100 steps",
            "loss": loss,
            "reduction": reduction or "–",
            "memory ratio": "1.0" if memory else "–",
            "seed": str(seed),
        },
        command="xbm demo --seeds 3",
        versions={"xbm": "0.1.0", "Python": "3.11.7", "torch": "2.11.0", "system": "Linux x86_64, 2 cores"},
    )


def demo(pictures: int = 12) -> list[RunView]:
    """Contrastive averaged and summed and multi-similarity, without and with memory, three seeds; the sum collapses."""
    settings = [
        ("contrastive", False, "mean", 0.652),
        ("contrastive", True, "mean", 0.699),
        ("contrastive", False, "sum", 0.623),
        ("contrastive", True, "sum", 0.241),
        ("multi-similarity", False, "", 0.599),
        ("multi-similarity", True, "", 0.641),
    ]
    rng = np.random.default_rng(7)
    return [
        run(loss, memory, seed, level + float(rng.normal(0, 0.011)), reduction, pictures, collapsed=level < 0.3)
        for loss, memory, reduction, level in settings
        for seed in range(3)
    ]
