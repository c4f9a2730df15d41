"""The files that GitHub, pre-commit and citation managers read: valid, complete, and in step with the project."""

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import xbm

ROOT = Path(__file__).parent.parent
yaml = pytest.importorskip("yaml")
REPOSITORY = "https://github.com/xbm-project/xbm"


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def steps(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_workflow_runs_what_ci_runs_and_a_matrix_of_python_and_torch():
    workflow = read(".github/workflows/ci.yml")
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as true
    assert {"push", "pull_request"} <= set(triggers) and workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    for job in jobs.values():
        assert job["runs-on"] and job["timeout-minutes"] and all({"run", "uses"} & set(step) for step in job["steps"])
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    assert steps(jobs["all"]) == [".ci/run"]
    (command,) = steps(jobs["library"])
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command.startswith("make test-torch") and "test-torch" in targets
    matrix = jobs["library"]["strategy"]["matrix"]
    for name in re.findall(r"\$\{\{ matrix\.(\w+) \}\}", str(jobs["library"])):
        assert name in matrix
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert min(matrix["python"], key=lambda v: tuple(map(int, v.split(".")))) == requires.removeprefix(">=")
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert all(version in page for version in matrix["torch"]), "the page says what was run with each torch"


def test_ci_builds_the_site_before_the_tests():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands.index("make docs") < commands.index("make test")
    recipe = (ROOT / "Makefile").read_text().split("\ndocs:")[1].split("\n\n")[0]
    assert "mkdocs build" in recipe and "--strict" in recipe and "links.py site" in recipe


def test_pre_commit_runs_the_checks_of_make_check():
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert all(repo["repo"] == "local" for repo in read(".pre-commit-config.yaml")["repos"])
    assert all(hook["language"] == "system" and hook["id"] and hook["name"] for hook in hooks)
    recipe = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    checks = [line.split("$(BIN)/")[1].split(" --check")[0].split(" .")[0] for line in recipe.splitlines() if "$(BIN)/" in line]
    entries = [hook["entry"].removeprefix(".venv/bin/") for hook in hooks]
    assert [entry.removesuffix(" --fix") for entry in entries] == checks


def test_the_citation_names_the_software_and_the_paper():
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["license"] == "MIT"
    assert {"message", "title", "authors", "repository-code"} <= set(citation)
    assert citation["version"] == xbm.__version__ and citation["repository-code"] == REPOSITORY
    paper = citation["preferred-citation"]
    assert paper["title"] == "Cross-Batch Memory for Embedding Learning" and paper["year"] == 2020
    assert [author["family-names"] for author in paper["authors"]] == ["Wang", "Zhang", "Huang", "Scott"]


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name)
def test_an_issue_template_has_what_github_requires(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        assert all(set(link) == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= set(form)
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) and ids
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert "value" in field["attributes"] if field["type"] == "markdown" else "label" in field["attributes"]


KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def test_the_changelog_has_the_form_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.startswith("# Changelog\n")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0].startswith(("[Unreleased]", f"[{xbm.__version__}] - "))
    for heading in versions[1 if versions[0].endswith("Unreleased") or versions[0] == "[Unreleased]" else 0 :]:
        day = re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d{2}-\d{2})", heading)
        assert day and date.fromisoformat(day[1]), heading
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert kinds and len(kinds) == len(set(kinds)) and set(kinds) <= set(KINDS), kinds


def test_every_file_that_a_visitor_looks_for_is_there():
    for name in ("CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "docs/releasing.md"):
        assert len((ROOT / name).read_text(encoding="utf-8")) > 500, name
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()
    assert "Deprecation" in (ROOT / "docs" / "releasing.md").read_text()


# ------------------------------------------------------------------ the comparison with other packages


def test_the_comparison_is_that_of_its_script_and_agrees_with_what_is_installed():
    import runpy
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    script = runpy.run_path(str(ROOT / "docs" / "site" / "comparison.py"))
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert page == script["page"](), "run `python docs/site/comparison.py`"
    checked = ["xbm"]
    for package, compared in script["VERSIONS"].items():
        try:
            same = version(package) == compared
        except PackageNotFoundError:
            same = False
        checked += [package] if same else []
    spec = find_spec("pytorch_metric_learning")
    installed = Path(spec.origin).parent.parent if spec and spec.origin else ROOT
    assert list(script["check"](installed, checked)) == []
    # a cell that is not true is noticed
    cell = script["ROWS"][0].cells[0]
    assert script["wrong"]("xbm", cell._replace(pattern="class Nothing"), None)
    assert script["wrong"]("xbm", cell._replace(pattern="no class CrossBatchMemory"), None)
    assert script["wrong"]("xbm", cell._replace(where="gone.py", pattern="no x"), None)
