"""The wheel: what is in it, and that it works where nothing of the checkout is at hand."""

import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import xbm

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_it_holds_every_module_and_page_the_type_marker_and_the_licence(wheel):
    names = set(wheel.namelist())
    kinds = (".py", ".txt", ".css", ".js", ".html", ".typed")
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.suffix in kinds}
    assert files <= names
    assert {"xbm/py.typed", "xbm/memory.py", "xbm_app/serve/page/index.html", "xbm_app/export/embed_onnx.txt"} <= files
    (licence,) = [name for name in names if name.endswith("licenses/LICENSE")]
    assert wheel.read(licence).decode().startswith("MIT License")


def test_it_holds_nothing_else(wheel):
    inside = [
        name for name in wheel.namelist() if not name.startswith(("xbm/", "xbm_app/", f"xbm-{xbm.__version__}.dist-info/"))
    ]
    assert inside == []
    assert not [name for name in wheel.namelist() if "__pycache__" in name or Path(name).name.startswith("test_")]


def test_it_says_what_it_needs(wheel):
    data = metadata(wheel)
    assert data["Name"] == "xbm" and data["Version"] == xbm.__version__
    assert data["Requires-Python"] == ">=3.11" and data["License-Expression"] == "MIT"
    needs = data.get_all("Requires-Dist")
    assert [need for need in needs if "extra ==" not in need] == ["torch>=2.6"], "torch and nothing heavier"
    assert set(data.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    wanted = {"train", "serve", "search", "export", "weights", "wandb", "mlflow", "hub", "all"}
    assert wanted <= set(PROJECT["optional-dependencies"])


def test_serving_needs_neither_onnx_nor_the_packages_of_training():
    served = " ".join(PROJECT["optional-dependencies"]["serve"])
    assert not [name for name in ("xbm[", "onnx", "matplotlib", "scipy", "tensorboard", "pyarrow") if name in served]


USE = """
import sys, xbm, torch
assert xbm.__file__.startswith(sys.argv[1]), xbm.__file__
memory = xbm.CrossBatchMemory(size=7, dim=4)
v = torch.nn.functional.normalize(torch.randn(3, 4, requires_grad=True))
labels, ids = torch.tensor([0, 0, 1]), torch.arange(3)
memory.enqueue(v.detach(), labels, ids)
for name in ("ContrastiveLoss", "TripletLoss", "MultiSimilarityLoss"):
    getattr(xbm, name)()(v, labels, memory, ids=ids).backward(retain_graph=True)
print(len(memory))
"""


def test_installed_from_the_wheel_alone_it_takes_a_step(wheel, tmp_path):
    wheel.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", USE, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_it_brings_the_command(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "xbm = xbm.__main__:main" in wheel.read(name).decode()
