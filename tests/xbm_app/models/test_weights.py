"""Weight files: what is read, what is refused, and in which words."""

from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.same import same
from tests.xbm_app.damage import damaged
from xbm.errors import DamagedFileError, InputError
from xbm_app.models.weights import State, download, fit_weights, read_weights


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5))


@pytest.fixture
def state() -> State:
    return {name: torch.randn_like(value, dtype=torch.float32) for name, value in net().state_dict().items()}


def assert_fitted(trunk: nn.Module, state: State) -> None:
    for name, value in trunk.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(value, state[name].float().reshape(value.shape))


WRAPPINGS: dict[str, Callable[[State], object]] = {
    "plain": lambda state: state,
    "in state_dict": lambda state: {"epoch": 3, "state_dict": state},
    "in model": lambda state: {"model": state},
    "from DataParallel": lambda state: {f"module.{name}": value for name, value in state.items()},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_pth_file_is_read_whatever_wraps_its_tensors(tmp_path: Path, state: State, wrapping: str) -> None:
    torch.save(WRAPPINGS[wrapping](state), tmp_path / "a.pth")
    assert list(read_weights(tmp_path / "a.pth")) == list(state)


def test_half_precision_safetensors_become_float32(tmp_path: Path, state: State) -> None:
    half = {name: value.half() for name, value in state.items()}
    save_file(half, tmp_path / "a.safetensors")
    trunk = net()
    fit_weights(trunk, read_weights(tmp_path / "a.safetensors"), "it", ())
    assert_fitted(trunk, half)
    assert {each.dtype for each in trunk.parameters()} == {torch.float32}


def test_a_classifier_in_the_file_is_ignored(state: State) -> None:
    trunk = net()
    fit_weights(trunk, state | {"fc.weight": torch.zeros(9, 5), "fc.bias": torch.zeros(9)}, "it", ("fc.",))
    assert_fitted(trunk, state)


def test_a_file_without_batch_counters_fits(state: State) -> None:
    trunk = net()
    fit_weights(trunk, {name: value for name, value in state.items() if "num_batches" not in name}, "it", ())
    assert_fitted(trunk, state)


def test_vectors_stored_as_one_row_fit(state: State) -> None:
    rows = {name: value[None] if name.startswith("1.") and value.dim() else value for name, value in state.items()}
    trunk = net()
    fit_weights(trunk, rows, "it", ())
    assert_fitted(trunk, state)


def test_tensors_that_are_missing_or_too_many_are_named_and_counted(state: State) -> None:
    del state["0.weight"], state["1.running_var"]
    with pytest.raises(InputError, match=r"^it do not fit.*2 missing: 0\.weight, 1\.running_var; 1 unexpected: stem\.weight"):
        fit_weights(net(), state | {"stem.weight": torch.zeros(1)}, "it", ("fc.",))


def test_one_tensor_too_many_is_refused(state: State) -> None:
    with pytest.raises(InputError, match=r"none missing; 1 unexpected: fc2\.weight"):
        fit_weights(net(), state | {"fc2.weight": torch.zeros(1)}, "it", ("fc.",))


def test_only_the_first_of_many_names_are_shown() -> None:
    with pytest.raises(InputError, match=r"6 missing: 0\.weight, 0\.bias, 1\.weight, …; none unexpected"):
        fit_weights(net(), {}, "it", ())


def test_a_wrong_shape_is_named_with_both_shapes(state: State) -> None:
    state["0.weight"] = torch.zeros(5, 4, 1, 1)
    with pytest.raises(InputError, match=r"0\.weight is \(5, 4, 1, 1\), not \(5, 3, 1, 1\); 1 such"):
        fit_weights(net(), state, "it", ())


def test_nothing_is_loaded_from_a_file_that_does_not_fit(state: State) -> None:
    trunk = net()
    before = {name: value.clone() for name, value in trunk.state_dict().items()}
    del state["1.bias"]
    with pytest.raises(InputError):
        fit_weights(trunk, state, "it", ())
    assert all(torch.equal(value, before[name]) for name, value in trunk.state_dict().items())


def test_a_path_that_does_not_exist_names_the_choices() -> None:
    with pytest.raises(InputError, match="'imagnet' are neither 'imagenet' nor 'none' nor a file"):
        read_weights("imagnet")


class Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("code ran",)


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": Payload()}, tmp_path / "a.pth")
    with pytest.raises(InputError, match="may run code"):
        read_weights(tmp_path / "a.pth")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not weights at all, but longer than a header"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedFileError, match=name) as caught:
        read_weights(tmp_path / name)
    assert caught.value.path == tmp_path / name and "\n" not in str(caught.value)


def test_a_flipped_bit_is_noticed(tmp_path: Path, state: State) -> None:
    torch.save(state, tmp_path / "a.pth")
    content = (tmp_path / "a.pth").read_bytes()
    for number, changed in enumerate(damaged(content, 40, 2)):
        (tmp_path / "a.pth").write_bytes(changed)
        try:
            read = read_weights(tmp_path / "a.pth")
        except InputError:
            continue
        assert same(read, state) == [], number  # in what no reader looks at


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_out_of_memory_is_not_taken_for_a_damaged_file_or_a_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> State:
        raise error("full")

    (tmp_path / "a.pth").touch()
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(error):
        read_weights(tmp_path / "a.pth")
    with pytest.raises(error):
        download("googlenet", fail, "remedy")()


@pytest.mark.parametrize("content", [[1, 2], {}, {"weight": 3}])
def test_a_file_without_a_state_dict_says_what_to_save(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(InputError, match="not a state dict"):
        read_weights(tmp_path / "a.pth")


def test_a_failed_download_is_one_sentence_with_the_remedy() -> None:
    def fetch() -> State:
        raise URLError("Name or service not known")

    with pytest.raises(InputError) as caught:
        download("googlenet", fetch, "download X and pass its path")()
    assert str(caught.value) == (
        "the ImageNet weights of googlenet could not be downloaded (<urlopen error Name or service not known>): "
        "download X and pass its path"
    )


def test_a_file_from_an_address_without_https_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "bn_inception-52deb4733.pth"
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(DamagedFileError, match="SHA-256 differs"):
        read_weights(path)
    assert list(read_weights(path.rename(tmp_path / "own.pth"))) == ["weight"]
