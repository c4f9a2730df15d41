"""Nothing damaged is used without a word: bit flips, pages of zeros, and hostile files, in everything that is read back."""

import os
import random
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import faiss
import numpy as np
import pyarrow.parquet
import pytest
import torch
import yaml

from tests.tiny import draw_photos, same, xbm
from tests.xbm_app.damage import damaged, hostile_contents, in_place_of, without
from xbm.errors import DamagedFileError, InputError
from xbm_app.data.own_images import read_folder
from xbm_app.data.store import prepare, read_stored, write_outline
from xbm_app.files import CHECKSUMS, MALFORMED, read_arrays, read_checkpoint, read_json, write_checkpoint
from xbm_app.search import neighbours
from xbm_app.search.catalogue import Catalogue, Entry
from xbm_app.search.embeddings import read_embeddings
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import update
from xbm_app.train import config as configs
from xbm_app.train.dataset import read_run
from xbm_app.train.metrics import read_metrics


def silent(path, contents, read):
    """Which of the contents are taken for what was written, though `read` then gives something else."""
    expected = read()

    def attempt():
        try:
            return same(expected, read())
        except (InputError, UserWarning):
            return []

    return [difference for difference in in_place_of(path, contents, attempt) if difference]


def written_checkpoint(folder, width):
    state = {"step": 7, "names": ["a", "b"], "model": {f"w{k}": torch.randn(37, width) for k in range(5)}, "memory": None}
    write_checkpoint(folder / "last.pt", state)
    return folder / "last.pt"


@pytest.fixture
def checkpoint(tmp_path):
    return written_checkpoint(tmp_path, 41)


@pytest.mark.parametrize(
    ("flips", "pages", "width", "least"),
    [(60, 8, 41, 30_000), pytest.param(800, 120, 1800, 1_300_000, marks=pytest.mark.slow)],
    ids=["some", "all 920"],
)
def test_no_damaged_checkpoint_is_used(tmp_path, flips, pages, width, least):
    checkpoint = written_checkpoint(tmp_path, width)
    content = checkpoint.read_bytes()
    assert len(content) > least
    assert silent(checkpoint, damaged(content, flips, pages), lambda: read_checkpoint(checkpoint)) == []


def test_damage_to_the_directory_of_a_checkpoint_is_noticed_too(checkpoint):
    content = checkpoint.read_bytes()
    directory = content.index(b"PK\x01\x02")
    contents = (content[:directory] + tail for tail in damaged(content[directory:], 100, 0))
    assert silent(checkpoint, contents, lambda: read_checkpoint(checkpoint)) == []


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory):
    return Path(shutil.copytree(finished, tmp_path_factory.mktemp("damaged") / "run"))


def listing(run):
    dataset = read_run(configs.load(run / "config.yaml"), run)
    return [[list(images.paths), images.labels.tolist()] for images in (dataset.train, dataset.protocols[0].query)]


def arrays_of(path):
    try:
        return {name: [array.dtype.str, array.tolist()] for name, array in read_arrays(path).items()}
    except (OSError, *MALFORMED) as error:  # no other kinds, of which callers would make tracebacks
        raise InputError(f"{path} is damaged") from error


READERS = {
    "config.yaml": lambda run: configs.to_dict(configs.load(run / "config.yaml")),
    "result.json": lambda run: read_json(run / "result.json"),
    "metrics.csv": lambda run: [{name: str(x) for name, x in row.items()} for row in read_metrics(run / "metrics.csv")],
    "split.csv": listing,
    "examples.npz": lambda run: arrays_of(run / "examples.npz"),
    "checkpoints/last.pt": lambda run: read_checkpoint(run / "checkpoints" / "last.pt"),
}


@pytest.mark.filterwarnings("error:.*was edited or damaged:UserWarning")
@pytest.mark.parametrize("name", READERS)
def test_no_damaged_file_of_a_run_is_used(run, name):
    path = run / name
    content = path.read_bytes()
    assert silent(path, damaged(content, 20, 3), lambda: READERS[name](run)) == []


@pytest.mark.parametrize("name", ["dataset.json", "train/manifest.json", "test/manifest.json", "test/shard-00000.bin"])
def test_no_damaged_store_is_used(tmp_path, name):
    dataset = read_folder(draw_photos(tmp_path / "photos", classes=4, each=2))
    for part in ("train", "test"):
        images = dataset.train if part == "train" else dataset.protocols[0].query
        prepare(images, tmp_path / "store" / part, 16, quiet=True)
    write_outline(dataset, tmp_path / "store")

    def read():
        stored = read_stored(tmp_path / "store").protocols[0].query
        return [list(stored.paths), stored.labels.tolist(), [stored.store.view(k).tolist() for k in range(len(stored))]]

    path = tmp_path / "store" / name
    assert silent(path, damaged(path.read_bytes(), 20, 3), read) == []


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_no_damaged_embeddings_are_used(tmp_path, own_photos, finished, suffix):
    path = tmp_path / f"rows{suffix}"
    assert xbm("embed", finished, own_photos, "--out", path).code == 0

    def read():
        return [
            [*((entry.path, entry.label) for entry in entries), vectors.tolist()] for entries, vectors in read_embeddings(path)
        ]

    assert silent(path, damaged(path.read_bytes(), 60, 3), read) == []


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_no_damaged_arrays_are_used(tmp_path, save):
    """Nor are those of which numpy would read a part only, or miss some."""
    path = tmp_path / "arrays.npz"
    save(path, embeddings=np.eye(60, 12), labels=np.arange(60), paths=np.array([f"{k}.png" for k in range(60)]))
    content = path.read_bytes()
    start = content.index(b"PK\x01\x02")
    directory = (content[:start] + tail for tail in damaged(content[start:], 1000, 0))
    headers = (damage + content[200:] for damage in damaged(content[:200], 1000, 0))
    assert silent(path, chain(damaged(content, 500, 3), directory, headers), lambda: arrays_of(path)) == []


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("config.yaml", "metrics.csv", "checksums.json")]


@pytest.mark.parametrize("name", ["examples.npz", "checkpoints/last.pt", *OTHERS])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(finished, tmp_path, name):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / name).unlink()
    os.mkfifo(run / name)
    command = ("evaluate", run) if name.startswith("checkpoints") else ("report", run, "--out", tmp_path / "page.html")
    script = "import sys; from xbm.__main__ import main; sys.argv[0] = 'xbm'; main()"
    done = subprocess.run([sys.executable, "-c", script, *map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr and name in done.stderr


def test_no_damaged_names_of_columns_are_used(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [{"path": f"{k}.png", "label": "a", "price": k, "embedding": [1.0, k]} for k in range(9)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, write_page_checksum=True)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    names = content.index(b"path", footer) - 20, content.index(b"price", footer) + 5
    contents = (content[: names[0]] + damage + content[names[1] :] for damage in damaged(content[slice(*names)], 500, 0))

    def read():
        return [[*((entry.path, entry.label) for entry in entries), rows.tolist()] for entries, rows in read_embeddings(path)]

    assert silent(path, contents, read) == []


@pytest.fixture(scope="module")
def made_index(finished, own_photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("damaged") / "index"
    update(finished, own_photos, out, pytest.fail, quiet=True)
    return out


def test_no_damaged_index_is_used_and_swapped_weights_are_repaired(made_index, own_photos, finished, tmp_path):
    index = Path(shutil.copytree(made_index, tmp_path / "index"))
    query = own_photos / "class_00" / "0.png"

    def read():
        searcher = Searcher(index)
        hits = searcher.search(searcher.embed(searcher.open(query)), 5)
        searcher.catalogue.close()
        return [list(hit) for hit in hits]

    expected = read()
    assert silent(index / "index.sqlite", damaged((index / "index.sqlite").read_bytes(), 12, 3), read) == []
    (weights,) = index.glob("model-*.pt")
    state = read_checkpoint(weights)
    write_checkpoint(weights, {**state, "model": {name: tensor * 2 for name, tensor in state["model"].items()}})
    with pytest.raises(DamagedFileError, match="run `xbm index` again"):
        read()
    code, _, err = xbm("index", finished, own_photos, "--out", index)
    assert code == 0, err
    assert [hit[1:] for hit in read()] == [hit[1:] for hit in expected]


@pytest.mark.parametrize(
    ("flips", "pages", "count", "least"),
    [(14, 4, 500, 10_000), pytest.param(110, 30, 25_000, 1_000_000, marks=pytest.mark.slow)],
    ids=["some", "all 140"],
)
def test_no_damaged_codes_change_a_result(tmp_path, monkeypatch, flips, pages, count, least):
    monkeypatch.setattr(neighbours, "EXACT_BYTES", 0)
    faiss.omp_set_num_threads(1)
    rows = np.random.default_rng(0).standard_normal((count, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    catalogue = Catalogue(tmp_path, write=True)
    catalogue.set("dim", 16)
    with catalogue.change():
        catalogue.add([Entry(f"{k}.png", "", 1, 1) for k in range(count)], rows, [b""] * count)
    neighbours.build(catalogue)
    path = tmp_path / neighbours.FILE
    assert path.stat().st_size > least
    contents = damaged(path.read_bytes(), flips, pages)
    assert silent(path, contents, lambda: [x.tolist() for x in neighbours.open_neighbours(catalogue).search(rows[:9], 7)]) == []
    catalogue.close()


# ------------------------------------------------------------------ hostile files, in folders without checksums


def checkpoints(path, tmp_path):
    """Checkpoints that are whole archives, but lack a part or have another in its place."""
    state = read_checkpoint(path)
    for name in state:
        for changed in ({key: x for key, x in state.items() if key != name}, {**state, name: None}, {**state, name: "x"}):
            torch.save(changed, tmp_path / "hostile.pt")
            yield (tmp_path / "hostile.pt").read_bytes()


def arrays(tmp_path):
    rows, labels = np.eye(6, 3), np.arange(6) // 2
    for changed in (
        {"embeddings": rows}, {"labels": labels}, {}, {"embeddings": rows, "labels": labels[:5]}, {"embeddings": labels,
        "labels": rows}, {"embeddings": rows * np.nan, "labels": labels}, {"embeddings": rows.astype(str), "labels": labels},
        {"embeddings": rows, "labels": np.array([None] * 6)}, {"embeddings": np.zeros((0, 3)), "labels": labels[:0]},
        {"embeddings": rows.astype(complex), "labels": labels}, {"embeddings": rows[0], "labels": labels[0]},
        {"embeddings": rows.astype("datetime64[s]"), "labels": labels}, {"embeddings": rows.astype(">f4"), "labels": labels},
        {"embeddings": rows.astype(np.float128), "labels": labels}, {"embeddings": rows, "labels": labels.astype("V8")},
        {"embeddings": rows, "labels": labels.astype(np.uint64) + np.uint64(2**63)},
    ):  # fmt: skip
        np.savez(tmp_path / "hostile.npz", **changed)
        yield (tmp_path / "hostile.npz").read_bytes()


def examples(path, tmp_path):
    with np.load(path) as file:
        whole = dict(file)
    for name in whole:
        for changed in (
            {key: x for key, x in whole.items() if key != name},
            {**whole, name: whole[name] + 10**6 if whole[name].dtype.kind == "i" else whole[name][:0]},
            {**whole, name: whole[name].astype(str)},
            {**whole, name: np.zeros(())},
        ):
            np.savez(tmp_path / "hostile.npz", **changed)
            yield (tmp_path / "hostile.npz").read_bytes()


def settings(path):
    values = yaml.safe_load(path.read_text())
    for section in values:
        for other in (None, 7, [], {"x": 1}, "&a [*a]", "\x1b[2J"):
            yield yaml.safe_dump({**values, section: other}).encode()
    yield b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    yield b"a: " + b"[" * 5000 + b"]" * 5000
    yield b"seed: !!python/object/apply:os.getcwd []\n"


def attempts(run, index, tmp_path):
    """(command, file, contents of the file): every file that a command reads back, in many hostile versions."""
    draw = random.Random(0)
    query = next(run.parent.rglob("class_00/0.png"))
    page, out = tmp_path / "page.html", tmp_path / "out.npz"
    report, drift = ("report", run, "--out", page), ("drift", run, "--out", tmp_path / "drift.svg")
    evaluate, embed = ("evaluate", run), ("embed", run, query.parent, "--out", out)
    search = ("search", index, query)
    of_json = list(hostile_contents((run / "result.json").read_bytes(), draw))
    yield report, run / "result.json", [*of_json[:9], *draw.sample(of_json[9:], 60)]
    yield (
        report,
        run / "config.yaml",
        [*hostile_contents((run / "config.yaml").read_bytes(), draw), *settings(run / "config.yaml")],
    )
    yield report, run / "examples.npz", [
        *hostile_contents((run / "examples.npz").read_bytes(), draw), *examples(run / "examples.npz", tmp_path)
    ]  # fmt: skip
    for command in (report, drift):
        yield command, run / "metrics.csv", [*hostile_contents((run / "metrics.csv").read_bytes(), draw), b"step\nnan\n", b"\n"]
    yield evaluate, run / "split.csv", hostile_contents((run / "split.csv").read_bytes(), draw)
    last = run / "checkpoints" / "last.pt"
    yield embed, last, [*hostile_contents(last.read_bytes(), draw), *checkpoints(last, tmp_path)]
    yield search, index / "index.sqlite", hostile_contents((index / "index.sqlite").read_bytes(), draw)
    (weights,) = index.glob("model-*.pt")
    yield search, weights, [*hostile_contents(weights.read_bytes(), draw), *checkpoints(weights, tmp_path)]
    npz = tmp_path / "given.npz"
    np.savez(npz, embeddings=np.eye(6, 3), labels=np.arange(6) // 2)
    yield ("evaluate", npz), npz, [*hostile_contents(npz.read_bytes(), draw), *arrays(tmp_path)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [30, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all of more than 199"])
def test_no_hostile_file_ends_in_a_traceback(finished, made_index, own_photos, tmp_path, count):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    index = Path(shutil.copytree(made_index, tmp_path / "index"))
    shutil.copytree(own_photos / "class_00", tmp_path / "photos" / "class_00")
    for folder in (run, index):
        without(folder, CHECKSUMS)
    tries = [(words, path, content) for words, path, contents in attempts(run, index, tmp_path) for content in contents]
    assert len(tries) >= 199
    failed, draw = [], random.Random(1)
    for words, path, content in tries if count is None else draw.sample(tries, count):

        def attempt(words=words):
            code, _, err = xbm(*words)
            return code, err

        try:
            ((code, err),) = in_place_of(path, iter([content]), attempt)
            bad = code not in (0, 2) or "Traceback" in err or "\x1b" in err
        except Exception as error:
            bad, err = True, repr(error)
        if bad:
            failed.append((words[0], path.name, content[:80], err[-300:]))
    assert failed == []
