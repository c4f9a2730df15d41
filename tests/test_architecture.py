"""The shape of the project: imports go one way, importing is light, tests mirror the source, files stay small, examples run."""

import ast
import doctest
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

import xbm

ROOT = Path(__file__).parent.parent
# The three parts, in the order in which they may import: the applications use the library, the paper uses both.
PARTS = {"xbm": ROOT / "src" / "xbm", "xbm_app": ROOT / "src" / "xbm_app", "paper": ROOT / "paper"}
FILES = {path: part for part, folder in PARTS.items() for path in sorted(folder.rglob("*.py"))}
RANK = {part: rank for rank, part in enumerate(PARTS)}

# What the library offers to everybody: its top-level names, and the public names of these modules.
PUBLIC_MODULES = {
    "xbm",
    "xbm.distributed",
    "xbm.errors",
    "xbm.integrations",
    "xbm.kernels",
    "xbm.losses",
    "xbm.memory",
    "xbm.retrieval",
    "xbm.testing",
}
# The only imports from below to above: loaded on first use, so that `xbm.load` and the `xbm` command are at hand.
LAZY_FORWARDS = {"xbm/__init__.py", "xbm/__main__.py"}

# Within the library and the applications: a folder or module imports only those of the layers before its own.
LAYERS = {
    "xbm": [
        {"errors"}, {"checks"}, {"kernels", "gradient_cache", "momentum_encoder"}, {"engine"}, {"memory"}, {"losses"},
        {"distributed"}, {"retrieval", "two_tower_loss"}, {"testing", "integrations"},
    ],
    "xbm_app": [
        {"extras", "progress"}, {"files"}, {"data", "models"}, {"train"}, {"report"},
        {"launch", "search", "export"}, {"serve"}, {"cli"}, {"main"},
    ],
}  # fmt: skip
MOST_LINES = 480
MOST_MODULES = 150  # in src and paper together; grow by replacing


def relative(path: Path) -> str:
    return path.relative_to(PARTS[FILES[path]].parent).as_posix()


def place(path: Path) -> str:
    """The name in `LAYERS` that a file belongs to: `data` for xbm_app/data/images.py, `memory` for xbm/memory.py."""
    return path.relative_to(PARTS[FILES[path]]).parts[0].removesuffix(".py")


class Import(NamedTuple):
    module: str  # the full dotted name of the module
    name: str | None  # what is imported from it; None: the module itself
    line: int


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every import of a file, with those inside functions, under TYPE_CHECKING and by `import_module("...")`."""
    tree = ast.parse(path.read_text())
    package = path.relative_to(root).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = root.joinpath(*base.split("."), alias.name)
                if inner.is_dir() or inner.with_suffix(".py").exists():
                    yield Import(f"{base}.{alias.name}", None, node.lineno)
                else:
                    yield Import(base, alias.name, node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            constants = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (Import(name, None, node.lineno) for name in constants)


def imports_of(path: Path) -> list[Import]:
    return list(imports(path, PARTS[FILES[path]].parent))


def target(found: Import) -> list[str]:
    """The dotted path of what is imported; for `from xbm import ContrastiveLoss` that of its home."""
    if found.module == "xbm" and found.name in xbm._HOME:
        return xbm._HOME[found.name].split(".")
    return found.module.split(".")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_library_knows_no_application_and_neither_knows_the_paper(path):
    upwards = [
        f"line {found.line}: {found.module}"
        for found in imports_of(path)
        if RANK.get(found.module.split(".")[0], -1) > RANK[FILES[path]] and relative(path) not in LAZY_FORWARDS
    ]
    assert not upwards, upwards


@pytest.mark.parametrize("path", [path for path, part in FILES.items() if part != "xbm"], ids=relative)
def test_clients_use_only_the_public_names_of_the_library(path):
    private = []
    for found in imports_of(path):
        if found.module.split(".")[0] != "xbm":
            continue
        if found.name is None and found.module in PUBLIC_MODULES:
            continue
        public = found.module in PUBLIC_MODULES and found.name in import_module(found.module).__all__
        if not public:
            private.append(f"line {found.line}: {found.name or 'all'} of {found.module}")
    assert not private, private


def test_every_file_has_its_place_in_the_map():
    placed = {part: set().union(*layers) for part, layers in LAYERS.items()}
    unplaced = {relative(path) for path, part in FILES.items() if part in LAYERS and place(path) not in placed[part]}
    assert unplaced <= {f"{part}/{name}.py" for part in LAYERS for name in ("__init__", "__main__")}


@pytest.mark.parametrize("path", [path for path, part in FILES.items() if part in LAYERS], ids=relative)
def test_imports_within_a_part_go_downwards_only(path):
    part, here, wrong = FILES[path], place(path), []
    rank = {name: k for k, names in enumerate(LAYERS[part]) for name in names}
    if here not in rank:
        return
    for found in imports_of(path):
        top, *inner = target(found)
        if top == part and inner and inner[0] in rank and inner[0] != here and rank[inner[0]] >= rank[here]:
            wrong.append(f"line {found.line}: {found.module}")
    assert not wrong, wrong


def test_no_folders_import_each_other():
    """At any level: a folder and a folder or module beside it may depend on each other in one direction only."""
    edges: set[tuple[str, str]] = set()
    for path in FILES:
        if relative(path) in LAZY_FORWARDS:
            continue
        here = relative(path).removesuffix(".py").removesuffix("/__init__").split("/")
        for found in imports_of(path):
            there = target(found)
            if there[0] not in PARTS:
                continue
            shared = next((k for k, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)))
            if shared < len(here) and shared < len(there):
                edges.add(("/".join(here[: shared + 1]), "/".join(there[: shared + 1])))
    both_ways = sorted(f"{a} and {b}" for a, b in edges if a < b and (b, a) in edges)
    folders = {str(Path(relative(path)).parent) for path in FILES}
    assert not [pair for pair in both_ways if any(side in folders for side in pair.split(" and "))], both_ways


@pytest.mark.parametrize("path", [path for path, part in FILES.items() if part == "xbm"], ids=relative)
def test_the_library_needs_torch_and_nothing_else(path):
    allowed = {"torch", "xbm", "xbm_app"} | sys.stdlib_module_names
    if "triton" in relative(path) or place(path) == "kernels":
        allowed |= {"triton"}  # comes with torch where there is a GPU
    if place(path) == "integrations":  # each of its names needs the library that it is for, once it is used
        allowed |= {"lightning", "pytorch_lightning", "sentence_transformers", "transformers"}
    foreign = [f"line {i.line}: {i.module}" for i in imports_of(path) if i.module.split(".")[0] not in allowed]
    assert not foreign, foreign


def test_the_tests_of_the_library_need_no_application():
    """Nor do the test modules that they import: `make test-torch` runs them without the applications' packages."""
    waiting, seen = sorted((ROOT / "tests" / "xbm").rglob("*.py")), set()
    for path in waiting:
        found = [i.module for i in imports(path, ROOT)]
        assert not [name for name in found if name.split(".")[0] in ("xbm_app", "paper")], path
        modules = {ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in found if name.startswith("tests.")} - seen
        waiting += sorted(module for module in modules if module.exists())
        seen |= modules


def operators(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions that `torch.library.custom_op` makes operators of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("custom_op" in ast.unparse(d) for d in node.decorator_list):
            yield node


def test_torch_2_6_can_read_the_annotations_of_every_operator():
    """It derives an operator's schema from them, at import, and knows the lists of `typing` only."""
    found = [node for path, part in FILES.items() if part == "xbm" for node in operators(ast.parse(path.read_text()))]
    assert len(found) >= 5
    for node in found:
        annotations = [ast.unparse(x) for x in (*(a.annotation for a in node.args.args), node.returns) if x is not None]
        assert not [text for text in annotations if text.startswith(("list[", "Sequence["))], f"{node.name}: use typing.List"


def test_the_rules_see_lazy_relative_and_typing_imports(tmp_path):
    (tmp_path / "xbm_app" / "data").mkdir(parents=True)
    (tmp_path / "xbm_app" / "cli").mkdir()
    file = tmp_path / "xbm_app" / "data" / "x.py"
    file.with_name("y.py").touch()
    file.write_text(
        "if TYPE_CHECKING:\n    from xbm_app.train import loop\n"
        "def f():\n    from .. import cli\n    import numpy.linalg\n    import_module('xbm_app.report.page')\n"
        "from xbm import ContrastiveLoss\nfrom . import y\nfrom .y import z\n"
    )
    found = {(i.module, i.name) for i in imports(file, tmp_path)}
    assert found == {
        ("xbm_app.train", "loop"),
        ("xbm_app.cli", None),
        ("numpy.linalg", None),
        ("xbm_app.report.page", None),
        ("xbm", "ContrastiveLoss"),
        ("xbm_app.data.y", None),
        ("xbm_app.data.y", "z"),
    }
    assert target(Import("xbm", "ContrastiveLoss", 1)) == ["xbm", "losses"]


# ------------------------------------------------------------------ errors are told apart by type


def messages_read(tree: ast.AST) -> list[int]:
    """The lines that compare, search or take apart the message of a caught exception. Quoting it in another one is fine."""
    lines = []
    for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name):
        message = {f"str({handler.name})", f"{handler.name}.args", f"{handler.name}.args[0]"}
        for node in ast.walk(handler):
            if isinstance(node, ast.Compare):
                parts = [ast.unparse(part) for part in (node.left, *node.comparators)]
            elif isinstance(node, ast.Call):
                parts = [ast.unparse(part) for part in node.args] if ast.unparse(node.func).startswith("re.") else []
                if isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith", "find", "index"):
                    parts.append(ast.unparse(node.func.value))
            else:
                continue
            lines += [node.lineno for part in parts if part in message]
    return lines


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_line_tests_the_message_of_an_exception(path):
    assert messages_read(ast.parse(path.read_text())) == []


def test_the_rule_sees_messages_that_are_read():
    source = "try: f()\nexcept E as e:\n    a = 'x' in str(e)\n    b = str(e).startswith('x')\n    c = re.match('y', str(e))"
    assert messages_read(ast.parse(source)) == [3, 4, 5]
    assert messages_read(ast.parse("try: f()\nexcept E as e:\n    raise X(f'{e}') from e")) == []


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
    core = [name for name, home in xbm._HOME.items() if home.split(".")[0] == "xbm"]
    assert {"CrossBatchMemory", "ContrastiveLoss", "MetricLearningLoss", "InputError"} <= set(core)
    done = subprocess.run([sys.executable, "-c", LOADED, *core], capture_output=True, text=True, check=True)
    bare, torch_only, everything = (set(names) for names in json.loads(done.stdout))
    assert "xbm" in bare and not bare & {"torch", "numpy", "typer", "rich"}
    generated = {"_remote_module_non_scriptable"}  # by torch.distributed
    extra = everything - torch_only - generated - sys.stdlib_module_names
    assert not extra, f"torch alone does not load {sorted(extra)}"
    assert not everything & {"torchvision", "matplotlib", "PIL", "typer", "rich", "pandas", "scipy", "pytorch_metric_learning"}


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'ContrastivLoss'"):
        xbm.ContrastivLoss  # noqa: B018
    assert {*xbm.__all__} <= set(dir(xbm)) and all(getattr(xbm, name) for name in dir(xbm))


def test_no_name_that_is_loaded_on_first_use_is_also_a_module():
    """Importing a module sets it as an attribute of its package, which would hide a function of the same name."""
    assert not set(xbm._HOME) & {path.stem for path in PARTS["xbm"].iterdir()}


def test_a_star_import_loads_no_application():
    """`from xbm import *` is for the library's own names; PIL and the rest come with `xbm.load` only."""
    script = (
        "from xbm import *\nimport sys\nassert ContrastiveLoss and not {'PIL', 'torchvision', 'xbm_app'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_type_checkers_see_the_names_that_are_loaded_on_first_use():
    """What `if TYPE_CHECKING:` imports and what `_HOME` loads are written twice: they must be the same."""
    declared = {}
    for node in ast.walk(ast.parse((PARTS["xbm"] / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("xbm"):
            declared.update({alias.asname or alias.name: node.module for alias in node.names})
    assert declared == xbm._HOME


# ------------------------------------------------------------------ the tree


def test_no_file_grows_too_long():
    long = {relative(path): n for path in FILES if (n := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long, f"split what holds more than one concept: {long}"


def test_the_number_of_modules_is_bounded():
    assert len(FILES) <= MOST_MODULES


def test_no_file_name_stands_twice_within_a_part():
    for part, folder in PARTS.items():
        names = [path.name for path in folder.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
        assert len(names) == len(set(names)), f"{part}: {sorted({name for name in names if names.count(name) > 1})}"


PAGES = ["CONTRIBUTING.md", "README.md"]
NAMES = ("architecture", "compatibility", "integrations", "pairs", "python", "scale", "search", "security")
PAGES += [f"docs/{name}.md" for name in NAMES]
NAMED_PATH = re.compile(r"`((?:src|paper|benchmarks|tests|examples|docs)/[\w./-]*)`")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page):
    missing = [name for name in NAMED_PATH.findall((ROOT / page).read_text()) if not (ROOT / name).exists()]
    assert not missing, missing


def test_the_map_names_every_folder_of_code():
    page = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.relative_to(ROOT).as_posix() for path in FILES}
    assert not [folder for folder in folders if folder not in page]


def test_there_is_no_drawer_for_odds_and_ends():
    assert not [relative(path) for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")]


# ------------------------------------------------------------------ the examples in the docstrings


def doctest_lines(path: Path) -> list[str]:
    """The lines of its examples that run."""
    return [line for line in path.read_text().splitlines() if line.lstrip().startswith(">>> ") and "+SKIP" not in line]


WITH_EXAMPLES = sorted(
    ".".join([FILES[path], *path.relative_to(PARTS[FILES[path]]).with_suffix("").parts]).removesuffix(".__init__")
    for path in FILES
    if doctest_lines(path) and FILES[path] != "paper"
)


NEEDS = {f"xbm.integrations.{name}": package for name, package in {
    "accelerate": "accelerate", "hugging_face": "transformers", "lightning": "lightning", "loss_checkpoint": "transformers",
}.items()}  # fmt: skip


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_in_the_docstrings_run(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    result = doctest.testmod(import_module(name), optionflags=doctest.REPORT_ONLY_FIRST_FAILURE | doctest.ELLIPSIS)
    assert result.failed == 0 and result.attempted > 0
