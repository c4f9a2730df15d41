"""`xbm` as a whole: quick help with an example for everything, and one sentence with exit code 2 for bad input."""

import errno
import subprocess
import sys
import warnings
from importlib.metadata import version

import pytest
import torch
from typer.main import get_command

from tests.tiny import draw_photos, tiny_config, xbm
from xbm.errors import InputError
from xbm_app import main as command_line
from xbm_app.cli import app
from xbm_app.train.config import save

COMMANDS = get_command(app).commands
HEAVY = ("torch", "torchvision", "numpy", "PIL", "timm", "scipy", "pyarrow", "matplotlib", "tensorboard", "yaml")


def test_the_commands_are_there():
    assert {"train", "evaluate", "embed", "demo", "presets", "datasets", "prepare", "report", "compare"} <= COMMANDS.keys()
    assert {"index", "search", "serve", "export"} <= COMMANDS.keys()


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["demo", "--help"], []])
def test_help_loads_nothing_heavy(words):
    script = f"""
import sys
sys.argv = ["xbm", *{words!r}]
from xbm.__main__ import main
try:
    main()
except SystemExit as end:
    print("code", end.code)
print("heavy", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "heavy []" in done.stdout and "Usage" in done.stdout, done.stdout + done.stderr
    assert "code 0" in done.stdout or not words


@pytest.mark.parametrize("name", sorted(name for name, command in COMMANDS.items() if not command.hidden))
def test_every_commands_help_shows_an_example(name):
    code, out, _ = xbm(name, "--help")
    assert code == 0 and "Example" in out and f"xbm {name}" in out.replace("\n", " ")


def test_the_papers_old_command_names_the_new_one():
    code, out, err = xbm("paper", "run", "x")
    assert code == 2 and "python -m paper" in err and out == ""


def test_every_option_that_is_not_plain_is_explained():
    for name, command in COMMANDS.items():
        silent = [p.name for p in command.params if p.param_type_name == "option" and not p.help and p.name not in ("help",)]
        assert silent == [], name


def test_python_dash_m_does_the_same():
    done = subprocess.run([sys.executable, "-m", "xbm", "train", "no"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown preset 'no'") and done.stderr.count("\n") == 1 and done.stdout == ""


def ends(monkeypatch, error: BaseException) -> tuple[int, str]:
    def app():
        raise error

    monkeypatch.setattr("xbm_app.cli.app", app)
    code, _, err = xbm()
    return code, err


def test_bad_input_is_one_sentence_and_exit_code_2(monkeypatch):
    assert ends(monkeypatch, InputError("give a folder")) == (2, "error: give a folder\n")


def test_a_warning_is_one_sentence_that_names_the_data_and_comes_once(tmp_path):
    draw_photos(tmp_path / "mine" / "train")
    draw_photos(tmp_path / "mine" / "test", side=17)  # other images of the same classes
    save(tiny_config(tmp_path / "mine", optim__iterations=1), tmp_path / "config.yaml")
    code, _, err = xbm("train", "--config", tmp_path / "config.yaml", "--out", tmp_path / "run", "--quiet")
    told = [line for line in err.splitlines() if "in training and in testing" in line]
    assert code == 0 and len(told) == 1 and told[0].startswith("warning: mine: ") and ".py" not in err


def test_other_packages_warnings_keep_their_place(monkeypatch):
    monkeypatch.setattr("xbm_app.cli.app", lambda: warnings.warn_explicit("slow", UserWarning, "/else/where.py", 7))
    _, _, err = xbm()
    assert "/else/where.py:7: UserWarning: slow" in err


def test_a_full_disk_is_one_sentence_too(monkeypatch):
    code, said = ends(monkeypatch, OSError(28, "No space left on device", "/x.npz"))
    assert (
        code == 2
        and said
        == "error: /x.npz cannot be read or written (No space left on device): free some disk space or check permissions\n"
    )


@pytest.mark.parametrize(("error", "where"), [(MemoryError(), "machine"), (torch.OutOfMemoryError("9 GiB"), "GPU")])
def test_too_little_memory_is_one_sentence_too(monkeypatch, error, where):
    code, said = ends(monkeypatch, error)
    assert code == 2 and f"the {where} is out of memory" in said and "batch.size" in said and said.count("\n") == 1


def test_other_errors_are_not_hidden(monkeypatch):
    with pytest.raises(RuntimeError, match="a defect"):
        ends(monkeypatch, RuntimeError("a defect"))


def test_a_disk_that_fails_is_not_called_full(monkeypatch):
    code, said = ends(monkeypatch, OSError(errno.EIO, "Input/output error", "/x.npz"))
    assert code == 2 and said.count("\n") == 1 and "/x.npz" in said and "space" not in said


def test_a_folder_in_place_of_a_file_is_one_sentence_too(monkeypatch):
    code, said = ends(monkeypatch, IsADirectoryError(21, "Is a directory", "/x"))
    assert code == 2 and said == "error: /x cannot be read or written (Is a directory): use another path\n"


def test_the_version_is_told():
    code, out, _ = xbm("--version")
    assert (code, out) == (0, f"{version('xbm')}\n")


def test_ctrl_c_is_no_accident(monkeypatch):
    assert ends(monkeypatch, KeyboardInterrupt()) == (130, "\ninterrupted\n")


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    for error in (RuntimeError("a bug"), OSError(errno.EBADF, "Bad file descriptor")):
        with pytest.raises(type(error)):
            ends(monkeypatch, error)


def test_a_torchvision_of_another_torch_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        code, said = ends(monkeypatch, error)
    assert code == 2 and said.count("\n") == 1 and "pip install --upgrade torch torchvision" in said


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xbm_app.cli", None)
    with pytest.raises(ModuleNotFoundError):
        command_line.main()
    script = "import sys; sys.modules['typer'] = None\nfrom xbm.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'xbm[train]'" in done.stderr and "Traceback" not in done.stderr


def test_an_unknown_command_is_refused():
    code, _, err = xbm("trian")
    assert code == 2 and "trian" in err


@pytest.mark.parametrize("while_importing", ["xbm_app.main", "xbm_app.cli", "typer"])
def test_ctrl_c_while_it_starts_is_no_traceback(while_importing):
    script = f"""
import sys
class Interrupted:
    def find_spec(self, name, *rest):
        if name == {while_importing!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from xbm.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


def test_control_characters_are_not_printed(monkeypatch):
    assert ends(monkeypatch, InputError("no \x1b[2J\n\u202e.png")) == (2, "error: no \\u001b[2J\\u000a\\u202e.png\n")
