"""The shape of the package: imports go one way, importing is light, tests mirror the source, files stay small, examples run."""

import ast
import doctest
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

import xbm

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "xbm"
FILES = sorted(SOURCE.rglob("*.py"))

# Import only downwards: a name may import those of the lines above it, never one of its own line or below.
LAYERS = [
    {"errors"},
    {"checks"},
    {"engine", "drift"},
    {"memory"},
    {"losses", "doubt"},
    {"distributed"},  # so far the core: torch and nothing else
    {"progress", "extras"},
    {"data", "models", "retrieval"},
    {"train"},
    {"study", "report"},
    {"search", "export"},
    {"serve"},
    {"cli"},
    {"__main__"},
]
CORE = set().union(*LAYERS[:6])
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MOST_LINES = 350


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def part(path: Path) -> str:
    """The name in the map that a file belongs to: `data` for data/own.py, `memory` for memory.py."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


class Import(NamedTuple):
    module: str  # as a full dotted name
    line: int
    for_types: bool  # under `if TYPE_CHECKING:`, so that it never runs


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file, lazy ones and `import_module("...")` too."""
    tree = ast.parse(path.read_text())
    for_types = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for_types |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    package = ["xbm", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "xbm" else [base]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        yield from (Import(name, node.lineno, id(node) in for_types) for name in names)


def target(module: str) -> str | None:
    """The part of the map that `xbm.…` lies in; None for the bare package and its own attributes."""
    name = module.split(".")[1] if "." in module else ""
    if name in xbm._HOME:  # `from xbm import ContrastiveLoss`
        name = xbm._HOME[name].split(".")[1]
    return None if name in ("", "__version__") else name


def test_every_part_has_its_place_in_the_map():
    unplaced = {part(path) for path in FILES} - set(RANK) - {"__init__"}
    assert not unplaced, f"say in LAYERS (and docs/architecture.md) which layer these belong to: {sorted(unplaced)}"


@pytest.mark.parametrize("path", [path for path in FILES if path != SOURCE / "__init__.py"], ids=relative)
def test_imports_go_downwards_only(path):
    """The front door is not among them: it loads the others on first use, see what importing it costs."""
    here, wrong = part(path), []
    for found in imports(path):
        there = target(found.module) if found.module.split(".")[0] == "xbm" else None
        if there is None or there == here:
            continue
        downwards = RANK[there] < RANK[here]
        beside_for_types = found.for_types and RANK[there] == RANK[here]
        if not (downwards or beside_for_types):
            wrong.append(f"{relative(path)}:{found.line} imports {found.module}")
    assert not wrong, wrong


@pytest.mark.parametrize("path", [path for path in FILES if part(path) in CORE], ids=relative)
def test_the_core_needs_torch_and_nothing_else(path):
    allowed = {"torch", "xbm"} | sys.stdlib_module_names
    if part(path) == "engine" and "triton" in path.relative_to(SOURCE).as_posix():
        allowed |= {"triton"}  # comes with torch where there is a GPU
    foreign = [f"line {i.line}: {i.module}" for i in imports(path) if i.module.split(".")[0] not in allowed]
    assert not foreign, foreign


def test_the_rule_sees_lazy_relative_and_typing_imports(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "x.py"
    file.write_text(
        "if TYPE_CHECKING:\n    from xbm.train import loop\n"
        "def f():\n    from ..cli import app\n    import numpy.linalg\n    import_module('xbm.report.page')\n"
        "from xbm import memory, ContrastiveLoss\nfrom . import y\n"
    )
    found = {(i.module, i.for_types) for i in imports(file)}
    assert found == {
        ("xbm.train", True),
        ("xbm.cli", False),
        ("numpy.linalg", False),
        ("xbm.report.page", False),
        ("xbm.memory", False),
        ("xbm.ContrastiveLoss", False),
        ("xbm.data", False),
    }
    assert target("xbm.ContrastiveLoss") == "losses" and target("xbm.data.own") == "data"


# ------------------------------------------------------------------ what importing costs

LOADED = """
import json, sys
def tops():
    return sorted({name.split(".")[0] for name in sys.modules})
import xbm
bare = tops()
import torch
torch_only = tops()
for name in sys.argv[1:]:
    getattr(xbm, name)
print(json.dumps([bare, torch_only, tops()]))
"""


def test_importing_xbm_loads_nothing_and_its_names_load_torch_and_nothing_heavier():
    core = [name for name, home in xbm._HOME.items() if home.split(".")[1] in CORE]
    assert {"CrossBatchMemory", "ContrastiveLoss", "MetricLearningLoss", "InputError"} <= set(core)
    done = subprocess.run([sys.executable, "-c", LOADED, *core], capture_output=True, text=True, check=True)
    bare, torch_only, everything = (set(names) for names in json.loads(done.stdout))
    assert "xbm" in bare and not bare & {"torch", "numpy", "typer", "rich"}
    extra = everything - torch_only - sys.stdlib_module_names
    assert not extra, f"torch alone does not load {sorted(extra)}"
    assert not everything & {"torchvision", "matplotlib", "PIL", "typer", "rich", "pandas", "scipy", "pytorch_metric_learning"}


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'ContrastivLoss'"):
        xbm.ContrastivLoss  # noqa: B018
    assert set(dir(xbm)) == set(xbm.__all__) and all(getattr(xbm, name) for name in xbm.__all__)


def test_type_checkers_see_the_names_that_are_loaded_on_first_use():
    """What `if TYPE_CHECKING:` imports and what `_HOME` loads are written twice: they must be the same."""
    declared = {}
    for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("xbm"):
            declared.update({alias.asname or alias.name: node.module for alias in node.names})
    assert declared == xbm._HOME


# ------------------------------------------------------------------ the tree

# Parts that mean nothing alone, and the tests of the whole that they are parts of.
TESTED_ELSEWHERE = {
    "data/benchmarks/benchmark.py": "data/benchmarks/test_miniatures.py",
    "data/glyph_classes.py": "data/test_glyphs.py",
    "data/glyph_render.py": "data/test_glyphs.py",
    "data/glyph_sheet.py": "data/test_glyphs.py",
    "data/sheet.py": "data/test_glyphs.py",
    "report/markup.py": "report/test_page.py",
    "report/summary.py": "report/test_page.py",
    "report/tables.py": "report/test_page.py",
    "report/view.py": "report/test_page.py",
    "retrieval/ranks.py": "retrieval/test_retrieval_metrics.py",
    "retrieval/same_key.py": "retrieval/test_retrieval_metrics.py",
    "retrieval/similarity.py": "retrieval/test_retrieval_metrics.py",
}


def mirrored(path: Path) -> list[Path]:
    """Where a file's tests may lie: at its place; with its package's name in front where another file took the plain one."""
    at = ROOT / "tests" / path.relative_to(SOURCE).parent
    return [at / f"test_{path.stem}.py", at / f"test_{path.parent.name}_{path.stem}.py"]


def test_the_tests_mirror_the_source():
    ours = [path for path in FILES if path.stem not in ("__init__", "__main__")]
    missing = [relative(p) for p in ours if relative(p) not in TESTED_ELSEWHERE and not any(t.exists() for t in mirrored(p))]
    assert not missing, f"no tests/**/test_X.py for {missing}"
    assert len(TESTED_ELSEWHERE) <= 12
    assert all((SOURCE / one).exists() and (ROOT / "tests" / other).exists() for one, other in TESTED_ELSEWHERE.items())


def test_every_folder_of_tests_is_a_folder_of_the_source():
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [str(folder) for folder in folders if not (SOURCE / folder).is_dir()]


def test_names_of_test_files_are_unique():
    """They are imported by their bare names."""
    stems = [path.stem for path in (ROOT / "tests").rglob("*.py") if path.stem != "conftest"]
    assert sorted(set(stems)) == sorted(stems)


def test_no_file_grows_too_long():
    long = {relative(path): n for path in FILES if (n := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long, f"split what holds more than one concept: {long}"


def test_there_is_no_drawer_for_odds_and_ends():
    assert not [relative(path) for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")]


# ------------------------------------------------------------------ the examples in the docstrings

PUBLIC = [
    "xbm",
    "xbm.memory",
    "xbm.errors",
    "xbm.extras",
    "xbm.progress",
    *(f"xbm.distributed.{p.stem}" for p in (SOURCE / "distributed").glob("[!_]*.py")),
    *(f"xbm.losses.{p.stem}" for p in (SOURCE / "losses").glob("[!_]*.py")),
]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_examples_in_the_docstrings_run(name):
    module = import_module(name)
    result = doctest.testmod(module, optionflags=doctest.REPORT_ONLY_FIRST_FAILURE)
    assert result.failed == 0
    assert (result.attempted > 0) == (">>>" in Path(str(module.__file__)).read_text())
