"""Weights of a trunk: read from a file without running code in it, downloaded, and loaded by name."""

import hashlib
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import shorten
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from xbm.errors import DamagedFileError, InputError
from xbm_app.files import verify_archive

State = dict[str, Tensor]

# SHA-256 of files that are downloaded by hand, from addresses without https
PUBLISHED = {"bn_inception-52deb4733.pth": "52deb473314542a5c2f87e9e6f26f4ca42fe863d15f986414dbae8c2dfdd2353"}


def read_weights(path: str | Path) -> State:
    """Reads the tensors of a .safetensors or .pth file, also if nested or named with a "module." prefix."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"weights {str(path)!r} are neither 'imagenet' nor 'none' nor a file that exists: give one of these")
    if path.name in PUBLISHED:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != PUBLISHED[path.name]:
                raise DamagedFileError(path, f"{path} is not the published file, its SHA-256 differs: download it again")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: object = load_file(path)
        else:
            if is_zipfile(path):
                verify_archive(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise DamagedFileError(
            path, f"{path} is damaged or contains more than tensors, which may run code: save only its state_dict()"
        ) from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the readers fail in many ways on a damaged file
        raise DamagedFileError(
            path, f"{path} cannot be read as weights ({_brief(error)}): download or save it again"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} is not a state dict (names and tensors): save the model's state_dict()")
    return {name.removeprefix("module."): value for name, value in state.items()}


def fit_weights(trunk: nn.Module, state: State, source: str, classifier: tuple[str, ...]) -> None:
    """Loads `state` into `trunk`. All names must match, except those of the classifier.

    Args:
        source: where the tensors come from, for messages.
        classifier: prefixes of the classifier's names, which a trunk does not have.
    """
    # Old files have no batch counters, and batch norm with a momentum does not use them.
    own = {name: value for name, value in trunk.state_dict().items() if not name.endswith("num_batches_tracked")}
    missing = [name for name in own if name not in state]
    extra = [name for name in state if name not in own and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in extra if not name.startswith(classifier)]
    if missing or unexpected:
        raise InputError(
            f"{source} do not fit this trunk ({_first(missing, 'missing')}; {_first(unexpected, 'unexpected')}): "
            "choose the trunk that they belong to"
        )
    # Converted Caffe files contain the vectors of batch norm as (1, C).
    wrong = [name for name, value in own.items() if state[name].squeeze().shape != value.squeeze().shape]
    if wrong:
        shape, expected = tuple(state[wrong[0]].shape), tuple(own[wrong[0]].shape)
        raise InputError(
            f"{source} do not fit this trunk ({wrong[0]} is {shape}, not {expected}; {len(wrong)} such shapes): "
            "choose the trunk that they belong to"
        )
    trunk.load_state_dict({name: state[name].reshape(value.shape) for name, value in own.items()}, strict=False)


def download(trunk: str, fetch: Callable[[], State], remedy: str) -> Callable[[], State]:
    """Wraps `fetch` such that a failure is an `InputError` that ends with the `remedy`."""

    def fetch_or_explain() -> State:
        try:
            return fetch()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each hub raises the errors of its own HTTP library
            message = f"the ImageNet weights of {trunk} could not be downloaded ({_brief(error)}): {remedy}"
            raise InputError(message) from error

    return fetch_or_explain


def _first(names: list[str], what: str) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} {what}: {shown}" if names else f"none {what}"


def _brief(error: Exception) -> str:
    return shorten(str(error) or type(error).__name__, 160, placeholder=" …")
