"""Hundreds of bad invocations, from a seeded generator: each ends in one sentence and exit code 2, none in a traceback."""

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measure import process_memory
from tests.tiny import set_options, xbm
from xbm_app.search.update import update
from xbm_app.serve import server
from xbm_app.train.config import Config, flat

NUMBERS = (
    "nan",
    "-1",
    "0",
    "1e300",
    "-1e300",
    "99999999999999999999",
    "0x10",
    "",
    "one",
    "1,,2",
    "[",
    "&a [*a]",
    "\x1b[2J",
    "٣",
)


WORDS = (
    "\udcff",
    "a" * 5000,
    "\x1b[2J",
    "'\"; --",
    "price<=",
    "label=\udcff",
    "price>1e999",
    "label<9999999999999999999999",
    "=",
    "a==b",
)
ENCODERS = (
    "", ":", "x", "x:", ".x:y", "..:y", "x.:y", "os:getcwd", "os:no", "os.path:join", "os:environ", "json:JSONEncoder",
    *(f"odd_encoders:{name}" for name in ("none", "ragged", "texts", "objects", "empty", "fails", "wide", "nan")),
    "odd_encoders:Needs", "odd_encoders:Fails", "\udcff:y", "fails_on_import:x", "lacks_a_package:x",
)  # fmt: skip
ODD_ENCODERS = """
import numpy as np

def none(images): pass
def ragged(images): return [[1.0], [1.0, 2.0]][: len(images)] + [[1.0]] * (len(images) - 2)
def texts(images): return ["a"] * len(images)
def objects(images): return [object() for _ in images]
def empty(images): return np.zeros((len(images), 0))
def fails(images): raise KeyError("x")
def wide(images): return np.ones((len(images), 77))
def nan(images): return np.full((len(images), 3), np.nan)

class Needs:
    def __init__(self, weights): pass

class Fails:
    def __init__(self): raise OSError("no weights")
"""
ENGINES = (
    "milvus:",
    "milvus:#",
    "milvus:x.db#1a",
    "milvus:no/such/x.db",
    "milvus:\udcff.db",
    "http://x",
    "\udcff",
    "milvus:x.db#\udcff",
)


def paths(folder: Path) -> list[str]:
    """What is not a run, an index, a table or an image, under names that could be one."""
    (folder / "empty").mkdir()
    (folder / "text.csv").write_text("path,label\n\x1b[2J.png,a\n../x.png,b\n,c\n")
    (folder / "boxes.csv").write_text("path,label,left,top,right,bottom\n" + "a.png,a,0,0,1e30,1e30\nb.png,b,nan,0,1,1\n")
    for name in ("x.png", "x.csv", "x.npz", "x.pt", "config.yaml"):
        os.mkfifo(folder / name)
    (folder / "bytes.npz").write_bytes(random.Random(0).randbytes(999))
    (folder / "bytes.parquet").write_bytes(random.Random(1).randbytes(999))
    (folder / "alias.yaml").write_text("data: &a [x, *a]\n")
    (folder / "bomb.yaml").write_text(
        "\n".join(["a0: &a0 [x, x]", *(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]" for k in range(1, 40))])
    )
    os.symlink("loop", folder / "loop")
    pipes = folder / "pipes"
    for number in range(5):
        (pipes / f"class_{number}").mkdir(parents=True)
        for image in range(2):
            os.mkfifo(pipes / f"class_{number}" / f"{image}.png")
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "checkpoints" / "last.pt").write_bytes(b"PK\x03\x04" + bytes(99))
    np.savez(folder / "odd.npz", embeddings=np.zeros((3, 0)), labels=np.zeros(3, int))
    made = [str(each) for each in folder.iterdir()]
    long = ("x" * 300, "y" * 300 + ".html")
    return [*sorted(made), "", "no/such", *long, "/dev/null", "/proc/self/mem", "\x1b[2J", "🦆/\u202e.png"]


def invocations(places: list[str], run: Path, photos: Path, out: Path) -> Iterator[list[object]]:
    """Each command with one argument or setting that is wrong, and a few that are right after all."""
    train: list[object] = ["train", "--data", photos, "--trunk", "small", "--quiet", "--out", out / "run"]
    short = set_options(optim__iterations=1, optim__decay_at=(1,))
    for name in flat(Config()):
        for value in NUMBERS:
            yield [*train, *short, "--set", f"{name}={value}"]
    for place in places:
        yield [*train[:2], place, *train[3:], *short]
        yield [*train[:-1], place, *short, "--set", "optim.iterations=-1"]
        yield ["train", "own", "--store", place, "--quiet", "--out", out / "run"]
        yield ["train", "--resume", place]
        yield ["train", "--config", place, "--out", out / "run"]
        yield ["train", "cars", "--root", place, "--out", out / "run"]
        for command in ("report", "drift", "evaluate", "export"):
            yield [command, place]
        yield ["compare", place, run, "--out", out / "page.html"]
        yield ["report", run, "--out", place]
        yield ["drift", run, "--out", place, "--json", place]
        yield ["evaluate", run, "--root", place]
        yield ["embed", run, place, "--out", out / "v.npz"]
        yield ["embed", place, photos, "--out", out / "v.npz"]
        yield ["embed", run, photos / "class_00", "--out", place]
        yield ["index", run, place, "--out", out / "index"]
        yield ["index", place, photos, "--out", out / "index"]
        yield ["search", place, photos / "class_00" / "0.png"]
        yield ["prepare", place, "--out", out / "store"]
        yield ["prepare", photos, "--out", place, "--resize", "8"]
        yield ["datasets", "check", "cars", "--root", place]
    for number in NUMBERS:
        yield ["evaluate", out / "none.npz", "--ks", number]
        yield ["prepare", photos, "--out", out / "store", "--resize", number, "--workers", "-1"]
        yield ["demo", "--seeds", number, "--iterations", "0", "--out", out / "demo"]
        yield ["presets", number]
        yield ["train", "--seed", number, "--preset"]
        yield [number]


def searches(places: list[str], run: Path, photos: Path, out: Path) -> Iterator[list[object]]:
    """The same of the commands around an index, which is in the run folder with a file of vectors beside it."""
    index, rows = run / "index", run / "rows.npz"
    for place in places:
        yield ["export", place, "--out", out / "exported"]
        yield ["serve", place]
        yield ["index", rows, place, "--out", out / "index"]
        yield ["index", place, place, "--encoder", "odd_encoders:wide", "--out", out / "index"]
        yield ["index", rows, "--to", f"milvus:{place}/x.db"]
    search: list[object] = ["search", index, photos / "class_00" / "0.png"]
    for word in WORDS:
        yield [*search, "--filter", word]
        yield [*search, "--label", word]
        yield [*search, "--text", word]
        yield ["serve", index, "--host", word]
        yield ["serve", index, "--allow-host", word, "--host", "0.0.0.0", "--token", word]
    for name in ENCODERS:
        yield [*search, "--encoder", name]
        yield ["index", photos, "--encoder", name, "--out", out / "index"]
        yield ["serve", index, "--encoder", name]
    for place in ENGINES:
        yield ["index", rows, "--to", place]
        yield ["search", place, photos / "class_00" / "0.png"]
        yield ["serve", place]
        yield ["export", place, "--out", out / "rows.parquet"]
    for number in NUMBERS:
        yield [*search, "--offset", number]
        yield [*search, "--top", number]
        yield ["serve", index, "--port", number, "--host", number]


@pytest.fixture
def little_memory():
    """Some of the numbers ask for more memory than there is. The command has to say so, and must not get it here."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = process_memory("VmSize") * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + 6_000_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="module")
def indexed(finished, own_photos, tmp_path_factory):
    """A run with an index, and a file of vectors."""
    run = Path(shutil.copytree(finished, tmp_path_factory.mktemp("indexed") / "run"))
    update(run, own_photos, run / "index", pytest.fail, quiet=True)
    np.savez(run / "rows.npz", embeddings=np.eye(5), paths=np.array([f"class_00/{k}.png" for k in range(5)]))
    return run


@pytest.fixture
def odd_encoders(tmp_path, monkeypatch):
    (tmp_path / "odd_encoders.py").write_text(ODD_ENCODERS)
    (tmp_path / "fails_on_import.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "lacks_a_package.py").write_text("import no_such_package_of_it\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def nothing_is_served(monkeypatch):
    """What is right after all would be served until Ctrl-C."""
    monkeypatch.setattr(server.Server, "run", lambda *_, **__: None)
    monkeypatch.setattr(server.Decoders, "start", lambda *_: None)
    monkeypatch.setattr(server, "expect_signals", lambda: None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("little_memory", "odd_encoders", "nothing_is_served")
@pytest.mark.parametrize("kind", [invocations, searches])
@pytest.mark.parametrize("count", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_no_bad_invocation_ends_in_a_traceback(indexed, own_photos, tmp_path, monkeypatch, kind, count):
    for name in ("bad", "here"):
        (tmp_path / name).mkdir()
    places, here = paths(tmp_path / "bad"), tmp_path / "here"
    monkeypatch.chdir(here)
    run = Path(shutil.copytree(indexed, tmp_path / "run"))
    given = list(kind(places, run, own_photos, here / "out"))
    failed = []
    for words in random.Random(count).sample(given, min(count, len(given))):
        shutil.rmtree(here / "out", ignore_errors=True)
        try:
            code, out, err = xbm(*words)
            bad = code not in (0, 2) or "Traceback" in err or "\x1b" in re.sub("\x1b\\[[0-9;]*m", "", out + err)
            bad = bad or (code == 2 and "rror" not in err)
        except Exception as error:
            bad, err = True, repr(error)
        if bad:
            failed.append((words, err[-300:]))
    assert not failed, "\n".join(map(repr, failed))
