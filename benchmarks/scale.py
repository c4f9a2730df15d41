"""Bytes sent per step and expected step time, for memories of up to a billion rows.

    python -m benchmarks.scale

The formulas for bytes are checked by tests/xbm/distributed/test_scale.py against what the ranks count as they send. The time of
a pass on one GPU was measured (results/h200-losses*.json). Everything else is computed from link speeds that are assumed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from benchmarks.gpu_page import loss_steps

LINKS = {"NVLink, one host": 300e9, "400 Gb/s between hosts": 40e9}  # bytes per second and GPU, assumed
EXCHANGE = 25e-6  # seconds of latency per exchange, assumed


CASES = [  # M, D, R, m
    (10**7, 128, 1, 64), (10**8, 128, 1, 64), (10**8, 128, 8, 64), (10**9, 128, 8, 64), (10**9, 128, 64, 64),
    (10**9, 128, 64, 4096), (10**8, 512, 8, 64), (10**8, 512, 8, 512),
]  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One training step on R ranks: M rows of dimension D, and m anchors on all ranks together, evenly distributed."""

    R: int
    M: int
    D: int
    m: int
    wide: int = 4  # bytes per entry of an embedding

    @property
    def batch(self) -> int:
        """Embeddings, labels and ids of the rank's anchors, and a header of five integers, sent to all others."""
        return (self.R - 1) * (-(-self.m // self.R) * (self.D * self.wide + 16) + 40)

    def replicated(self, update: str = "queue") -> int:
        value = self._reduced(4)
        rows = self._reduced(4 * self.M * self.D) if update == "backprop" else 0
        return self.batch + value + rows

    def sharded(
        self, loss: str, copy: bool = False, keyed: bool = False, positives: tuple[int, int] = (0, 0), stats: bool = True
    ) -> int:
        """Returns the bytes of a step with a sharded memory.

        Args:
            copy: whether the loss uses exclude="copy".
            positives: for the triplet loss, the most positives of an anchor in one shard and in all of them.
            stats: whether statistics are computed, as in training.
        """
        if self.R == 1:
            return 0
        m, S = self.m, self.wide
        sent = self.batch + self._scattered(-(-m // self.R) * self.R * self.D * 4)
        sides = 2 * (self._reduced(2 * m * S) + self._reduced(4 * m * 8))
        sent += sides
        if stats or loss in ("triplet", "multi_similarity"):
            sent += self._reduced(2 * m * S)  # extremes of the positives
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
    """Milliseconds by rows and columns of a bfloat16 memory: contrastive loss and gradient of 64 anchors in a CUDA graph."""
    times = {}
    for part, (_, cases) in loss_steps().items():
        rows, dim = (int(side) for side in part.split("x"))
        times[rows, dim] = cases["contrastive, few valid, in a graph"]["ms"]
    return times


def pass_ms(rows: float, dim: int, anchors: int) -> float:
    """Estimates one GPU's pass over its rows from the measured rate of the largest memory of that dimension."""
    known, ms = max((key, ms) for key, ms in measured().items() if key[1] == dim)
    return ms * rows / known[0] * max(1.0, anchors / 64)


def bytes_table() -> list[str]:
    """Bytes that one rank sends per step with statistics: 64 anchors, 59,551 rows, 512-d float32."""
    rows: dict[str, Callable[[Step], int]] = {
        "replicated: queue or moving average, any loss": lambda step: step.replicated(),
        "replicated: back-propagation, any loss": lambda step: step.replicated("backprop"),
        "sharded queue: contrastive, MS and all others but triplet": lambda step: step.sharded("contrastive"),
        "sharded queue: triplet, 4 positives per anchor, 2 per shard": lambda step: step.sharded("triplet", positives=(2, 4)),
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
        "| M | D | R | total m | rows per rank | bank per rank | pass | sent per rank | sending, one host | between hosts |",
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
