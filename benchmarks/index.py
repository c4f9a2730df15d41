"""Our index of a million random 128-d rows compared with faiss used directly, in one process on the same rows.

    python -m benchmarks.index

Random rows are the hardest case: no row is much nearer than the others, and no cell of an inverted file holds all neighbors.
Ours is written to the catalogue, encoded, stored, reopened and searched; for faiss the rows are already in memory. The indexes
take turns, so that other load on the machine affects all of them equally.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measure import medians
from xbm_app.search.catalogue import FILE as CATALOGUE
from xbm_app.search.catalogue import Catalogue, Entry
from xbm_app.search.neighbours import FILE as CODES
from xbm_app.search.neighbours import build, open_neighbours, recall

ROWS, DIM, QUERIES, K, THREADS = 1_000_000, 128, 200, 10, 2
EQUIVALENT = "PQ64x4fs,Refine(SQfp16)"  # the type of our index
FAISS = {"Flat": 0, EQUIVALENT: 0, "SQ8": 0, "IVF1024,Flat": 64, "IVF1024,PQ64x4fs,RFlat": 64}  # name: probed cells


class Built(NamedTuple):
    seconds: float
    megabytes: float
    search: Callable[[np.ndarray], np.ndarray]  # (Q, D) to indices of the nearest rows, (Q, K)


def unit(count: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, DIM), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def ours(folder: Path, rows: np.ndarray) -> Built:
    begun = time.perf_counter()
    catalogue = Catalogue(folder, write=True)
    catalogue.set("dim", DIM)
    for start in range(0, len(rows), 10_000):
        entries = [Entry(f"{k}.jpg", "", 1, 1) for k in range(start, min(len(rows), start + 10_000))]
        with catalogue.change():
            catalogue.add(entries, rows[start : start + 10_000], [b""] * len(entries))
    written = time.perf_counter() - begun
    begun = time.perf_counter()
    neighbours = build(catalogue)
    coded = time.perf_counter() - begun
    measured = recall(neighbours, catalogue)
    del neighbours
    begun = time.perf_counter()
    opened = open_neighbours(catalogue)
    sizes = [(folder / name).stat().st_size / 1e6 for name in (CATALOGUE, CODES)]
    print(f"ours: catalogue written in {written:.1f} s ({sizes[0]:.0f} MB), codes built in {coded:.1f} s ({sizes[1]:.0f} MB)")
    print(f"opened again in {time.perf_counter() - begun:.1f} s; recall@10 as `xbm index` prints it {measured:.3f}")
    return Built(coded, opened.bytes / 1e6, lambda queries: opened.search(queries, K)[1] - 1)  # ids start at 1


def faiss_index(name: str, probed: int, rows: np.ndarray) -> Built:
    begun = time.perf_counter()
    index = faiss.index_factory(DIM, name, faiss.METRIC_INNER_PRODUCT)
    index.train(rows[:100_000])
    index.add(rows)
    spent = time.perf_counter() - begun
    if probed:
        faiss.extract_index_ivf(index).nprobe = probed
    if hasattr(index, "k_factor"):
        index.k_factor = 100
    return Built(spent, len(faiss.serialize_index(index)) / 1e6, lambda queries: index.search(queries, K)[1])


def main() -> None:
    faiss.omp_set_num_threads(THREADS)
    rows, queries = unit(ROWS, 0), unit(QUERIES, 1)
    with tempfile.TemporaryDirectory() as folder:
        built = {"xbm index": ours(Path(folder), rows)}
        for name, probed in FAISS.items():
            built[f"faiss {name}{f', {probed} cells probed' if probed else ''}"] = faiss_index(name, probed, rows)
        truth = built["faiss Flat"].search(queries)
        together = medians({name: lambda each=each: each.search(queries) for name, each in built.items()}, 3, 1)
        alone = medians(
            {name: lambda each=each: [each.search(q[None]) for q in queries[:10]] for name, each in built.items()}, 5
        )
    table = Table(title=f"{ROWS:,} random {DIM}-d rows, {THREADS} threads, {QUERIES} queries")
    for heading in ("index", "build, s", "MB", "recall@10", "queries/s", "ms alone"):
        table.add_column(heading, justify="left" if heading == "index" else "right")
    for name, each in built.items():
        hits = np.mean([len(set(a) & set(b)) / K for a, b in zip(each.search(queries).tolist(), truth.tolist())])
        rate = f"{QUERIES / together[name]:,.0f}"
        table.add_row(name, f"{each.seconds:.1f}", f"{each.megabytes:.0f}", f"{hits:.3f}", rate, f"{100 * alone[name]:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
