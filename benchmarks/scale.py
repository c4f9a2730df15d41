"""`python -m benchmarks.scale`: bytes a step sends and the step time to expect, for banks up to a billion rows.

Counted: bytes, by the formulas that tests/distributed/test_scale.py holds against what the ranks count as they send.
Measured: the one-GPU passes, from results/h200-losses*.json. Arithmetic: everything else, from link speeds that are stated
and not measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from benchmarks.gpu_page import loss_steps

LINKS = {"NVLink, one host": 300e9, "400 Gb/s between hosts": 40e9}  # bytes a second a GPU can use, assumed
EXCHANGE = 25e-6  # seconds an exchange takes however small it is, assumed


CASES = [  # M, D, R, m
    (10**7, 128, 1, 64), (10**8, 128, 1, 64), (10**8, 128, 8, 64), (10**9, 128, 8, 64), (10**9, 128, 64, 64),
    (10**9, 128, 64, 4096), (10**8, 512, 8, 64), (10**8, 512, 8, 512),
]  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One training step: R ranks, M rows, dimension D, m anchors of all ranks together, evenly shared."""

    R: int
    M: int
    D: int
    m: int
    wide: int = 4  # bytes of a number of the embeddings

    @property
    def batch(self) -> int:
        """Embeddings, labels and ids of the rank's anchors to all others; and five integers about them."""
        return (self.R - 1) * (-(-self.m // self.R) * (self.D * self.wide + 16) + 40)

    def replicated(self, update: str = "queue") -> int:
        value = self._reduced(4)
        rows = self._reduced(4 * self.M * self.D) if update == "backprop" else 0
        return self.batch + value + rows

    def sharded(
        self, loss: str, copy: bool = False, keyed: bool = False, positives: tuple[int, int] = (0, 0), stats: bool = True
    ) -> int:
        """`copy`: exclude="copy". `positives`, for triplets: the most that an anchor has in one shard, and in all of them.
        `stats`: with statistics, as a training run asks for."""
        if self.R == 1:
            return 0
        m, S = self.m, self.wide
        sent = self.batch + self._scattered(-(-m // self.R) * self.R * self.D * 4)
        sides = 2 * (self._reduced(2 * m * S) + self._reduced(4 * m * 8))
        sent += sides
        if stats or loss in ("triplet", "multi_similarity"):
            sent += self._reduced(2 * m * S)  # the positives' extremes
        if loss == "triplet":
            sent += (self.R - 1) * (8 + positives[0] * m * S) + self._reduced(8 * positives[1] * m)
        if copy and not keyed:
            sent += self._reduced(8 * m)
        return sent + (self._reduced(8) if keyed else 0)

    def _reduced(self, size: int) -> int:
        return 2 * size * (self.R - 1) // self.R

    def _scattered(self, size: int) -> int:
        return size * (self.R - 1) // self.R


@cache
def measured() -> dict[tuple[int, int], float]:
    """Contrastive loss and gradient in a CUDA graph, 64 anchors; rows and columns of bfloat16: milliseconds."""
    found = {}
    for part, (_, cases) in loss_steps().items():
        rows, dim = (int(side) for side in part.split("x"))
        found[rows, dim] = cases["contrastive, few valid, in a graph"]["ms"]
    return found


def pass_ms(rows: float, dim: int, anchors: int) -> float:
    """One GPU's pass over its rows: the measured rate of the largest bank of that dimension, scaled."""
    known, ms = max((key, ms) for key, ms in measured().items() if key[1] == dim)
    return ms * rows / known[0] * max(1.0, anchors / 64)


def bytes_table() -> list[str]:
    """Bytes that one rank sends in one step with statistics: 64 anchors of 512 float32 numbers, 59,551 rows."""
    rows: dict[str, Callable[[Step], int]] = {
        "replicated: queue or moving average, any loss": lambda step: step.replicated(),
        "replicated: back-propagation, any loss": lambda step: step.replicated("backprop"),
        "sharded queue: contrastive, MS and all others but triplet": lambda step: step.sharded("contrastive"),
        "sharded queue: triplet, 4 positives an anchor, 2 in one shard": lambda step: step.sharded("triplet", positives=(2, 4)),
        "sharded, keyed: contrastive, MS and all others but triplet": lambda step: step.sharded("contrastive", keyed=True),
    }
    ranks = (1, 2, 3, 4, 8)
    lines = ["| R | " + " | ".join(map(str, ranks)) + " |", "|---|" + "---|" * len(ranks)]
    return lines + [
        f"| {name} | " + " | ".join(f"{count(Step(R, 59_551, 512, 64)):,}" for R in ranks) + " |"
        for name, count in rows.items()
    ]


def table() -> list[str]:
    lines = [
        "| M | D | R | m, all ranks | rows a rank | bank a rank | pass | sent a rank | sending, one host | between hosts |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for M, D, R, m in CASES:
        step = Step(R, M, D, m)
        sent = step.sharded("contrastive")
        times = [f"{1e3 * (sent / speed + (9 * EXCHANGE if R > 1 else 0)):.2f} ms" for speed in LINKS.values()]
        bank = M / R * (2 * D + 24) / 1e9
        lines.append(
            f"| {M:,} | {D} | {R} | {m:,} | {M // R:,} | {bank:.1f} GB | {pass_ms(M / R, D, m):.2f} ms | {sent / 1e6:.2f} MB | "
            + " | ".join(times) + " |"
        )  # fmt: skip
    return lines


if __name__ == "__main__":
    print("\n".join([*bytes_table(), "", *table()]))
