"""What a package index shows: a README whose links work there, and one place for the version."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import xbm

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_relative_links_lead_to_the_repository(hook):
    text = "![a picture](docs/a.png) and [a page](docs/a.md#part), [outside](https://example.org/a), [here](#part)"
    assert hook.absolute(text, "https://example.org/x", "1.0") == (
        "![a picture](https://example.org/x/raw/v1.0/docs/a.png) and [a page](https://example.org/x/blob/v1.0/docs/a.md#part), "
        "[outside](https://example.org/a), [here](#part)"
    )


def test_no_relative_link_of_the_readme_is_left(hook):
    metadata = {"urls": PROJECT["urls"], "version": "1.0"}
    hook.ReadmeHook(str(ROOT), {}).update(metadata)
    readme = metadata["readme"]["text"]
    targets = re.findall(r"\]\(([^)]+)\)", readme) + re.findall(r'(?:src|href|srcset)="([^"]+)"', readme)
    assert targets and all(target.startswith(("https://", "#")) for target in targets)


def test_the_version_has_one_place():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[?{re.escape(xbm.__version__)}\]?", changelog, re.M), "the changelog has no entry for this version"
