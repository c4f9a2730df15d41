"""The documentation: links lead somewhere, the reference has every public name, and every example and command runs."""

import ast
import doctest
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_architecture import PUBLIC_MODULES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINKS = runpy.run_path(str(DOCS / "site" / "links.py"))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "paper").glob("*.md"), *(ROOT / ".github").rglob("*.md")])
BLOCK = re.compile(r"^```(python|console)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^::: ([\w.]+)", re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield Block(match[1], match[2], text[: match.start(2)].count("\n"))


# ------------------------------------------------------------------ links


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page):
    assert list(LINKS["broken_in_page"](page, ROOT)) == []


def test_the_check_of_pages_sees_broken_links(tmp_path):
    (tmp_path / "there.md").write_text("# A `title`, twice\n# A title, twice\n```\n# no title\n```\n::: xbm.load\n")
    page = tmp_path / "page.md"
    good = (
        "[a](there.md#a-title-twice) [b](there.md#a-title-twice-1) [c](there.md#xbm.load) ![d](there.md) [e](https://x.org/#y)"
    )
    page.write_text(good + "\n\n`[code](gone.md)`\n\n    [code](gone.md)\n\n```\n[code](gone.md)\n```\n")
    assert list(LINKS["broken_in_page"](page, tmp_path)) == []
    page.write_text("[a](gone.md) [b](there.md#no-title) ![c](gone.png) [d](#here) [e](htp://x.org) [f](https://x) [g](../..)")
    assert len(list(LINKS["broken_in_page"](page, tmp_path))) == 7


def test_the_check_of_the_site_sees_broken_links_and_what_comes_from_elsewhere(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<h1 id="title"></h1><a href="../index.html">good</a>')
    page = tmp_path / "index.html"
    page.write_text(
        '<a href="a/#title"></a><a href="a/"></a><a href="https://x.org"></a><link rel="canonical" href="https://x.org">'
    )
    assert list(LINKS["broken_in_site"](tmp_path)) == []
    page.write_text('<a href="b/"></a><a href="a/#no"></a><img src="c.png"><script src="https://x.org/y.js"></script>')
    assert len(list(LINKS["broken_in_site"](tmp_path))) == 4


def test_every_page_is_in_the_navigation():
    """The strict build fails on this too; here it costs no time."""
    listed = set(re.findall(r"^ +- (?:[^:\n]+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    written = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert listed == written | {"contributing.md", "changelog.md"}


# ------------------------------------------------------------------ the reference


REFERENCE = {page: page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md"))}
SHOWN = {name: page for page, text in REFERENCE.items() for name in DIRECTIVE.findall(text)}


def found(name: str) -> object:
    """The object of a dotted name."""
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def public_names() -> Iterator[tuple[str, str]]:
    for module in sorted(PUBLIC_MODULES):
        names = {*import_module(module).__all__, *(["load"] if module == "xbm" else [])}
        yield from ((module, name) for name in sorted(names))


def identity(value: object) -> object:
    """Equal for the same class or function under two names, and for constants only under the same name."""
    return getattr(value, "__module__", None), getattr(value, "__qualname__", None) or repr(value)


def slow_if_it_imports_trainers(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow if "integrations" in name else ())


@pytest.mark.parametrize("module", [slow_if_it_imports_trainers(name) for name in sorted(PUBLIC_MODULES)])
def test_every_public_name_is_on_a_reference_page(module):
    shown = {identity(found(name)) for name in SHOWN if "integrations" in module or "integrations" not in name}
    names = [name for home, name in public_names() if home == module and name != "__version__"]
    missing = [name for name in names if identity(getattr(import_module(module), name)) not in shown]
    assert not missing, f"add `::: {module}.{missing[0]}` to a page in docs/reference"


def documentation(value: object) -> str:
    """The docstrings of a class or function, with those of its own members."""
    members = vars(value).values() if isinstance(value, type) else ()
    texts = [getattr(each, "__doc__", None) for each in (value, *members) if callable(each) or isinstance(each, property)]
    return "\n".join(text for text in texts if text)


@pytest.mark.parametrize("name", [slow_if_it_imports_trainers(name) for name in SHOWN])
def test_every_name_of_the_reference_has_an_example(name):
    page = "\n".join(block.text for block in blocks(SHOWN[name]))
    if re.search(rf"\b{name.split('.')[-1]}\b", page):
        return
    value = found(name)
    assert callable(value) and ">>>" in documentation(value), (
        f"{name} has no example, in its docstring or on {SHOWN[name].name}"
    )


@pytest.mark.parametrize("page", [slow_if_it_imports_trainers(name_of(page)) for page in REFERENCE if any(blocks(page))])
def test_the_examples_of_a_reference_page_run(page, request):
    page, namespace = ROOT / page, {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    if page.name == "training.md":
        folder = request.getfixturevalue("own_photos")
        namespace = {"run": request.getfixturevalue("finished"), "photo": next(folder.rglob("*.png"))}
    for block in blocks(page):
        test = doctest.DocTestParser().get_doctest(block.text, namespace, page.name, str(page), block.line)
        assert test.examples, f"line {block.line}: a block of the reference is a doctest"
        runner.run(test, clear_globs=False)
        namespace = test.globs
    assert runner.summarize(verbose=False).failed == 0


# ------------------------------------------------------------------ the guides

WITH_CODE = [page for page in PAGES if page.is_relative_to(DOCS) and page not in REFERENCE and any(blocks(page))]
# pairs.md is run by test_readme.py, integrations.md by the tests of each integration; robustness.md needs FiftyOne.
NOT_RUN_HERE = {"integrations.md", "robustness.md", "pairs.md"}
GUIDES = [page for page in WITH_CODE if page.name not in NOT_RUN_HERE]
SHORTER = {"train": ["--trunk", "small", "--quiet"], "prepare": ["--resize", "16"]}
# The check of labels is for pretrained models, which are not at hand.
CHECKED = ["memory.update=moving_average", "memory.doubt=skip", "memory.ratio=1"]
# These need a network, another machine or a browser, or stay up; the tests of the server and of the wheel have them.
ELSEWHERE = ("pip", "curl", "git", "make", "torchrun", "python")


@pytest.mark.parametrize("page", [page for page in GUIDES if any(b.language == "console" for b in blocks(page))], ids=name_of)
def test_the_commands_of_a_guide_parse(page):
    """Fast: every option exists. The slow test runs them."""
    for command in commands(page):
        if command[0] != "xbm":
            assert command[0] in ELSEWHERE, command
            continue
        options = [word.split("=")[0] for word in command[2:] if word.startswith("--")]
        assert not [option for option in options if option not in help_of(command[1])], command


@lru_cache
def help_of(command: str) -> str:
    from tests.tiny import xbm

    answer = xbm(command, "--help")
    assert answer.code == 0, command
    return answer.out


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page):
        if block.language == "console":
            yield from commands_of(block)


def commands_of(block: Block) -> Iterator[list[str]]:
    for line in block.text.splitlines():
        if line.startswith("$ "):
            yield shlex.split(line[2:], comments=True)


def run_python(block: Block, page: Path, namespace: dict[str, object]) -> None:
    exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in GUIDES if all(b.language == "python" for b in blocks(page))], ids=name_of)
def test_the_python_of_a_guide_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        run_python(block, page, namespace)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if any(b.language == "console" for b in blocks(page))], ids=name_of)
def test_a_guide_runs_from_top_to_bottom(page, tmp_path, monkeypatch, finished):
    """Its commands and its Python, one after the other in one folder, as a reader would type them; training is cut short."""
    from tests.tiny import set_options, xbm

    monkeypatch.chdir(tmp_path)
    prepare(tmp_path, finished)
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        if block.language == "python":
            run_python(block, page, namespace)
            continue
        for command in commands_of(block):
            if command[0] != "xbm" or command[1] in ("serve", "demo") or "cars" in command:  # they have tests of their own
                continue
            options = SHORTER.get(command[1], [])
            if command[1] == "train":
                options = options + set_options(optim__iterations=25, optim__decay_at=(20,))
                if page.stem == "wrong-labels":
                    options += [word for setting in CHECKED for word in ("--set", setting)]
            if "--out" in command and command[1] == "train":
                shutil.rmtree(command[command.index("--out") + 1], ignore_errors=True)
            done = xbm(command[1], *options, *command[2:])  # what the guide sets comes last, and holds
            assert done.code == 0, (command, done.err)


def prepare(folder: Path, run: Path) -> None:
    from tests.tiny import draw_photos

    shutil.copytree(run, folder / "runs" / "photos")
    draw_photos(folder / "photos")
    shutil.copy(folder / "photos" / "class_03" / "1.png", folder / "query.jpg")
    rows = [f"photos/class_{k:02d}/{n}.png,{k}" for k in range(12) for n in range(6)]
    (folder / "photos.csv").write_text("path,label\n" + "\n".join(rows) + "\n")


def test_every_page_with_code_is_run_somewhere():
    mine = {page.name for page in GUIDES} | NOT_RUN_HERE
    assert {page.name for page in WITH_CODE} <= mine
    for page in WITH_CODE:
        for block in blocks(page):
            if block.language == "python" and ">>>" not in block.text:
                ast.parse(block.text)
