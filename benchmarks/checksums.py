"""What verifying files costs, in CPU seconds per GB: each way to save and load, with its checksum and without it.

    python -m benchmarks.checksums

The two take turns in one process, on a file in the page cache. CPU time is not hidden by the disk, nor increased by other
programs. `torch.save` computes the checksums in a checkpoint by itself, so both columns have that cost. A store is verified in
threads, so that it takes less time than this where there are several cores.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import machine
from xbm_app.data import store
from xbm_app.data.images import ImageSet
from xbm_app.data.store import open_store, prepare
from xbm_app.files import FORMAT, read_checkpoint, record_checksum, replacing, verify, write_checkpoint

SIZE = 1 << 28  # bytes of each file
SIDE = 256
REPEATS = 5


class Pair(NamedTuple):
    with_checksum: Callable[[], object]
    without: Callable[[], object]


def write_plain(path: Path, state: dict) -> None:
    with replacing(path) as temporary:
        torch.save(state, temporary)


def cases(folder: Path) -> dict[str, Pair]:
    content = np.random.default_rng(0).bytes(SIZE)
    state = {"format": FORMAT, "rows": torch.frombuffer(bytearray(content), dtype=torch.float32)}
    archive, plain, pictures = folder / "last.pt", folder / "index.sqlite", folder / "store"

    def write(checksum: bool) -> None:
        with replacing(plain, checksum) as temporary:
            temporary.write_bytes(content)

    def open_without() -> None:
        verified, store.verify = store.verify, lambda path, **_: path
        try:
            open_store(pictures, None)
        finally:
            store.verify = verified

    write(True)
    write_checkpoint(archive, state)
    pixels = np.frombuffer(content, np.uint8).reshape(-1, SIDE, SIDE, 4)[..., :3]
    prepare(
        ImageSet("noise", np.zeros(len(pixels), np.int64), ["a"], pixels=np.ascontiguousarray(pixels)),
        pictures,
        SIDE,
        quiet=True,
    )
    return {
        "save a checkpoint": Pair(lambda: write_checkpoint(archive, state), lambda: write_plain(folder / "without.pt", state)),
        "load a checkpoint": Pair(lambda: read_checkpoint(archive), lambda: torch.load(archive, weights_only=True)),
        "save another file": Pair(lambda: write(True), lambda: write(False)),
        "load another file": Pair(lambda: verify(plain).read_bytes(), plain.read_bytes),
        "change a file in place": Pair(lambda: record_checksum(plain), lambda: None),
        "open a store": Pair(lambda: open_store(pictures, None), open_without),
    }


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    table = Table(title=f"CPU seconds per GB; {machine()}", title_justify="left")
    for column in ("", "with checksum", "without", "cost"):
        table.add_column(column, justify="right" if column else "left")
    with tempfile.TemporaryDirectory() as folder:
        for name, pair in cases(Path(folder)).items():
            size = SIZE * (3 / 4 if name == "open a store" else 1)
            rounds = [[cpu_seconds(call) for call in pair] for _ in range(REPEATS + 1)][1:]
            checked, plain = (statistics.median(each) * 1e9 / size for each in zip(*rounds))
            table.add_row(name, f"{checked:.2f}", f"{plain:.2f}", f"{checked - plain:+.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
