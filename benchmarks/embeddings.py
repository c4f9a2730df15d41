"""A million embeddings made elsewhere, from Parquet with metadata: our index and Milvus beside faiss by hand.

    python -m benchmarks.embeddings make FOLDER       # 1,000,000 × 384 in FOLDER/rows.parquet, queries, and the true neighbors
    python -m benchmarks.embeddings index FOLDER      # xbm index rows.parquet --out index
    python -m benchmarks.embeddings milvus FOLDER     # xbm index rows.parquet --to milvus:rows.db; --again continues a load
    python -m benchmarks.embeddings search FOLDER     # all engines that are there, in turns in one process

The rows are drawn around 20,000 random directions, 50 rows each, so that near neighbors exist, as in real embeddings; the
queries are drawn likewise. Each step adds what it measured to FOLDER/figures.json. `--rows` makes fewer.
"""

import argparse
import datetime
import json
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pyarrow
import pyarrow.parquet

from benchmarks.measure import medians, process_memory
from xbm_app.search.filters import Filter, filters_of
from xbm_app.search.searcher import Searcher

ROWS, DIM, QUERIES, K, THREADS, CHUNK = 1_000_000, 384, 100, 10, 2, 50_000
SLOW = 1.0  # seconds: an engine that takes longer for a query is asked a tenth of them
EACH = 50  # rows around one direction
SPREAD = 0.8  # length of the noise beside the direction: neighbors have a similarity of about 0.6
KINDS = {"none": [], "half: price<500": ["price<500"], "1 %: price<10": ["price<10"], "0.1 %: label=7": ["label=7"]}


def drawn(directions: np.ndarray, chosen: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """(len(chosen), D): unit rows around some of the directions."""
    noise = draw.standard_normal((len(chosen), DIM), dtype=np.float32)
    rows = directions[chosen] + SPREAD * noise / np.sqrt(DIM)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def make(folder: Path, rows: int) -> dict[str, object]:
    """Writes the table, and the exact neighbors of the queries under every filter."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    directions = draw.standard_normal((rows // EACH, DIM), dtype=np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    queries = drawn(directions, draw.integers(0, len(directions), QUERIES), draw)
    vectors = pyarrow.list_(pyarrow.float32(), DIM)
    kinds = {"path": pyarrow.string(), "label": pyarrow.string(), "price": pyarrow.int64(), "shop": pyarrow.string()}
    schema = pyarrow.schema([*kinds.items(), ("embedding", vectors)])
    best: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in KINDS}
    with pyarrow.parquet.ParquetWriter(folder / "rows.parquet", schema) as writer:
        for start in range(0, rows, CHUNK):
            numbers = np.arange(start, min(rows, start + CHUNK))
            embedded = drawn(directions, draw.integers(0, len(directions), len(numbers)), draw)
            labels, prices = draw.integers(0, 1000, len(numbers)), draw.integers(0, 1000, len(numbers))
            columns = [
                pyarrow.array([f"{k:07d}.jpg" for k in numbers.tolist()]), pyarrow.array(list(map(str, labels.tolist()))),
                pyarrow.array(prices), pyarrow.array([f"shop {k % 7}" for k in numbers.tolist()]),
                pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(embedded.ravel()), DIM),
            ]  # fmt: skip
            writer.write_table(pyarrow.table(columns, schema=schema))
            met = (numbers >= 0, prices < 500, prices < 10, labels == 7)
            for name, mask in zip(KINDS, met):
                near, place = faiss.knn(queries, embedded[mask], min(K, int(mask.sum())), metric=faiss.METRIC_INNER_PRODUCT)
                best[name].append((near, numbers[mask][place]))
    truth = {}
    for name, parts in best.items():
        near, numbers = (np.hstack([part[k] for part in parts]) for k in (0, 1))
        truth[name] = np.take_along_axis(numbers, np.argsort(-near, 1)[:, :K], 1)
    np.savez(folder / "truth.npz", queries=queries, **truth)
    return {"rows": rows, "dim": DIM, "megabytes": round((folder / "rows.parquet").stat().st_size / 1e6)}


def filled(folder: Path, *where: str) -> dict[str, object]:
    """Runs `xbm index`; returns its time, its memory, and what it printed.

    CPU seconds tell more than seconds on a machine that is shared.
    """
    begun, peak = time.perf_counter(), [0]
    command = [sys.executable, "-m", "xbm", "index", str(folder / "rows.parquet"), *where]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def watch() -> None:
        while process.poll() is None:
            try:
                peak[0] = max(peak[0], process_memory("VmRSS", process.pid))
            except (OSError, StopIteration):
                return
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "seconds": round(time.perf_counter() - begun, 1),
        "peak_mb": peak[0] // 1024,
        "printed": printed.splitlines()[:2],
    }


Search = Callable[[np.ndarray], list[int]]  # (D,) to the numbers of the nearest rows


def engine(where: Path | str) -> Callable[[list[str]], Search]:
    """Ours, as `xbm search` and the server use it; a filter is parsed and looked up for every query."""
    searcher = Searcher(where, hold=True)

    def under(texts: list[str]) -> Search:
        def search(query: np.ndarray) -> list[int]:
            conditions: tuple[Filter, ...] = filters_of(texts)
            return [int(hit.path[:-4]) for hit in searcher.search(query, K, conditions)]

        return search

    return under


def by_hand(folder: Path, figures: dict[str, object]) -> dict[str, Callable[[list[str]], Search]]:
    """What one writes with faiss: the type of our index; and exact search, with a selector of the rows that meet a filter."""
    columns = pyarrow.parquet.read_table(folder / "rows.parquet", columns=["label", "price"])
    price, label = columns["price"].to_numpy(), columns["label"].to_numpy()
    met = {"price<500": price < 500, "price<10": price < 10, "label=7": label == "7"}
    compressed = faiss.index_factory(DIM, f"PQ{DIM // 2}x4fs,Refine(SQfp16)", faiss.METRIC_INNER_PRODUCT)
    exact, spent = faiss.IndexFlatIP(DIM), {"exact": 0.0, "compressed": 0.0}
    batches = pyarrow.parquet.ParquetFile(folder / "rows.parquet").iter_batches(65_536, columns=["embedding"])
    for number, batch in enumerate(batches):
        rows = batch.column(0).flatten().to_numpy().reshape(-1, DIM)
        for name, index in (("exact", exact), ("compressed", compressed)):
            begun = time.perf_counter()
            if name == "compressed" and not number:
                index.train(rows)
            index.add(rows)
            spent[name] += time.perf_counter() - begun
    figures["faiss_built_in"] = {name: round(seconds, 1) for name, seconds in spent.items()}
    selectors = {name: faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little")) for name, mask in met.items()}

    def exactly(texts: list[str]) -> Search:
        params = faiss.SearchParameters(sel=selectors[texts[0]]) if texts else None
        return lambda query: exact.search(query[None], K, params=params)[1][0].tolist()

    def compressedly(texts: list[str]) -> Search:
        """A fast scan takes no selector: more rows are fetched, and those that do not meet the filter are dropped."""
        mask = met[texts[0]] if texts else None
        depth = K if mask is None else min(len(mask), int(2 * K * len(mask) / mask.sum()))
        params = faiss.IndexRefineSearchParameters(k_factor=max(1000 / depth, 8.0))

        def search(query: np.ndarray) -> list[int]:
            found = compressed.search(query[None], depth, params=params)[1][0]
            return (found if mask is None else found[mask[found]])[:K].tolist()

        return search

    return {"faiss, compressed": compressedly, "faiss, exact": exactly}


def searched(folder: Path, repeats: int) -> dict[str, object]:
    faiss.omp_set_num_threads(THREADS)
    figures: dict[str, object] = {}
    with np.load(folder / "truth.npz") as file:
        truth = dict(file)
    queries = truth.pop("queries")
    engines: dict[str, Callable[[list[str]], Search]] = {}
    for name, where in (("xbm", folder / "index"), ("milvus", f"milvus:{folder / 'rows.db'}")):
        if (folder / ("index" if name == "xbm" else "rows.db")).exists():
            begun = time.perf_counter()
            engines[name] = engine(where)
            figures[f"{name}_opened_in"] = round(time.perf_counter() - begun, 1)
    some = queries[:: max(1, len(queries) // 20)]
    engines |= by_hand(folder, figures)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for kind, texts in KINDS.items():
        searches = {name: under(texts) for name, under in engines.items()}
        recalls, asked = {}, {}
        for name, search in searches.items():
            begun = time.perf_counter()
            first = search(queries[0])
            table.setdefault(kind, {})[name] = {"first_ms": round(1000 * (time.perf_counter() - begun), 1)}
            begun = time.perf_counter()
            found = [first, search(queries[1])]
            slow = time.perf_counter() - begun > SLOW
            asked[name] = some[:2] if slow else some
            found += map(search, queries[2:10] if slow else queries[2:])
            recalls[name] = statistics.mean(len(set(a) & set(b)) / K for a, b in zip(found, truth[kind].tolist()))
        rounds = {
            name: lambda search=search, asked=asked[name]: [search(q) for q in asked] for name, search in searches.items()
        }
        seconds = medians(rounds, repeats, 0)
        for name in searches:
            rate = round(len(asked[name]) / seconds[name], 2)
            table[kind][name] |= {"recall@10": round(recalls[name], 4), "queries_per_second": rate}
            print(kind, name, table[kind][name], flush=True)
    return {**figures, "table": table, "memory_mb": process_memory("VmRSS") // 1024}


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "index", "milvus", "search"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    file = given.folder / "figures.json"
    steps: dict[str, Callable[[], dict[str, object]]] = {
        "make": lambda: make(given.folder, given.rows),
        "index": lambda: filled(given.folder, "--out", str(given.folder / "index")),
        "milvus": lambda: filled(given.folder, "--to", f"milvus:{given.folder / 'rows.db'}"),
        "search": lambda: searched(given.folder, given.repeats),
    }
    measured = steps[given.step]() | {"commit": commit(), "date": datetime.date.today().isoformat()}
    figures = json.loads(file.read_text()) if file.exists() else {"machine": platform.processor() or platform.machine()}
    file.write_text(json.dumps({**figures, given.step: measured}, indent=1) + "\n")
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
