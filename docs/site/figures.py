"""Draws the figures of the concept pages: python docs/site/figures.py

`queue.svg` and `slots.svg` are drawings. `push.svg` is computed: the weights are those of ContrastiveLoss.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from xbm import ContrastiveLoss

OUT = Path(__file__).parent.parent / "concepts"
INK, GRAY, TEAL, ORANGE, RED, PALE = "#263238", "#78909c", "#00796b", "#ef6c00", "#c62828", "#eceff1"
CLASSES = (TEAL, ORANGE, "#5e35b1", "#1565c0", "#ad1457")


def text(
    x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "middle", weight: str = "normal"
) -> str:
    style = f'font-family="sans-serif" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}" {style}>{words}</text>'


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", radius: float = 3, opacity: float = 1) -> str:
    shape = f'x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius}"'
    return f'<rect {shape} fill="{fill}" stroke="{stroke}" fill-opacity="{opacity}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, color: str = GRAY, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'<line {ends} stroke="{color}" stroke-width="1.6" marker-end="url(#tip)"{dashed}/>'


def line(points: list[tuple[float, float]], color: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.2"{dashed}/>'


def write(name: str, width: int, height: int, title: str, parts: Iterator[str]) -> None:
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{GRAY}"/></marker></defs>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    (OUT / name).write_text("\n".join([head, f"<title>{title}</title>", tip, *parts, "</svg>"]) + "\n", encoding="utf-8")


def rows(x: float, y: float, labels: list[int], opacities: list[float], w: float = 15, h: float = 54) -> Iterator[str]:
    for k, (label, opacity) in enumerate(zip(labels, opacities)):
        yield box(x + k * (w + 3), y, w, h, CLASSES[label], opacity=opacity)


def queue() -> Iterator[str]:
    yield text(52, 40, "batch", weight="bold")
    for k in range(4):
        yield box(28, 54 + 26 * k, 48, 20, CLASSES[k // 2], opacity=0.35)
    yield arrow(84, 105, 122, 105)
    yield box(126, 80, 70, 50, PALE, GRAY)
    yield text(161, 110, "model")
    yield arrow(200, 105, 238, 105)
    yield text(272, 40, "anchors", weight="bold")
    yield from rows(240, 78, [0, 0, 1, 1], [1] * 4)
    yield text(272, 152, "with a gradient", 11, GRAY)
    yield text(548, 40, "memory", weight="bold")
    labels = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0, 3, 3, 1, 1, 2, 2, 4, 4]
    yield from rows(370, 78, labels, [1 - 0.035 * k for k in range(20)])
    yield text(370, 152, "newest", 11, GRAY, "start")
    yield text(727, 152, "oldest: overwritten next", 11, GRAY, "end")
    yield text(548, 62, "the embeddings of past batches, without a gradient", 11, GRAY)
    yield arrow(314, 105, 364, 105)
    yield text(339, 96, "enqueue", 11, GRAY)
    yield f'<path d="M272,160 C272,215 540,215 540,164" fill="none" stroke="{RED}" stroke-width="1.8" marker-end="url(#tip)"/>'
    yield text(406, 224, "the loss compares every anchor with every row", 13, RED)


def slots() -> Iterator[str]:
    yield text(180, 30, "a queue: rows by time", weight="bold")
    yield from rows(28, 48, [0, 3, 1, 0, 2, 4, 0, 1, 3, 2, 4, 0, 1, 2, 3, 4], [1 - 0.045 * k for k in range(16)])
    names = ["a", "f", "c", "a", "d", "g", "b", "c", "e", "d", "h", "a", "c", "d", "f", "g"]
    for k, name in enumerate(names):
        yield text(35.5 + 18 * k, 120, name, 11, RED if name == "a" else GRAY)
    yield text(172, 144, "image a has three rows, two of them old", 12)
    yield text(560, 30, "one slot per image", weight="bold")
    yield from rows(484, 48, [0, 0, 1, 2, 3, 3, 4, 4], [1] * 8)
    for k, name in enumerate("abcdefgh"):
        yield text(491.5 + 18 * k, 120, name, 11, RED if name == "a" else GRAY)
    yield text(555, 144, "a new view of a is averaged into its slot", 12)


def negative_weight(reduction: str, negatives: int, positives: int = 4) -> float:
    """The weights of an anchor's valid negatives together, relative to those of its positives."""
    S = torch.full((1, positives + negatives), 0.8)  # all alike, so that every negative is valid
    positive = torch.arange(positives + negatives)[None] < positives
    weights = ContrastiveLoss(reduction=reduction).weights(S, positive, ~positive)
    return float(weights[~positive].abs().sum() / weights[positive].abs().sum())


def push() -> Iterator[str]:
    left, top, width, height = 70, 30, 420, 210
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]

    def x(count: int) -> float:
        return left + width * counts.index(count) / (len(counts) - 1)

    def y(ratio: float) -> float:  # logarithmic, from 0.1 to 1000
        return top + height * (1 - (torch.log10(torch.tensor(ratio)).item() + 1) / 4)

    for ratio in (0.1, 1.0, 10.0, 100.0, 1000.0):
        yield line([(left, y(ratio)), (left + width, y(ratio))], PALE if ratio != 1 else GRAY, "" if ratio != 1 else "4 3")
        yield text(left - 8, y(ratio) + 4, f"{ratio:g}", 11, GRAY, "end")
    for count in (1, 4, 16, 64, 256, 1024):
        yield text(x(count), top + height + 18, f"{count:,}", 11, GRAY)
    yield text(left + width / 2, top + height + 40, "valid negatives of an anchor that has 4 positives", 12)
    yield text(left, 16, "push of the negatives ÷ pull of the positives", 12, INK, "start", "bold")
    for reduction, color, dash in (("sum", RED, ""), ("mean", ORANGE, ""), ("balanced", TEAL, "7 4")):
        points = [(x(count), y(negative_weight(reduction, count))) for count in counts]
        yield line(points, color, dash)
    yield text(x(64) - 6, y(26), "sum", 13, RED, "end", "bold")
    yield text(x(1), y(1.35), "mean", 13, ORANGE, "start", "bold")
    yield text(x(256), y(0.55), "balanced", 13, TEAL, "middle", "bold")


if __name__ == "__main__":
    write("queue.svg", 760, 240, "A batch passes the model, is enqueued, and is compared with all rows of the memory", queue())
    write("slots.svg", 760, 160, "A queue holds rows by time; a keyed memory has one slot per image", slots())
    write("push.svg", 520, 290, "How much an anchor's negatives weigh against its positives, for three reductions", push())
