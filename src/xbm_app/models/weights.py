"""Weights of a trunk from a file, a hub or a package: read without running their code, fitted by name, or one sentence."""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from xbm.errors import InputError

State = dict[str, Tensor]


def read_weights(path: str | Path) -> State:
    """The tensors of a .safetensors file, or of a .pth file whatever it wraps them in, without a "module." prefix."""
    path = Path(path)
    if not path.is_file():
        raise InputError(
            f"weights {str(path)!r} are neither 'imagenet' nor 'none' nor a file that exists: give one of the three"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: object = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"{path} holds more than tensors, which may run code: save its state_dict() alone and pass that"
        ) from None
    except Exception as error:  # a damaged file fails in a dozen ways inside the readers
        raise InputError(f"{path} cannot be read as weights ({_brief(error)}): download or save it again") from None
    for wrapper in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{path} is not a state dict (names and tensors): save the model's state_dict() and pass that")
    return {name.removeprefix("module."): value for name, value in state.items()}


def fit_weights(trunk: nn.Module, state: State, source: str, classifier: tuple[str, ...]) -> None:
    """Copies `state` into `trunk`; every tensor must find its place, except those of the classifier.

    Args:
        source: where the tensors are from, for messages.
        classifier: beginnings of names that only classify; a trunk has no such tensors.
    """
    # Counters of batches are absent from old files and unused where momentum is given.
    own = {name: value for name, value in trunk.state_dict().items() if not name.endswith("num_batches_tracked")}
    missing = [name for name in own if name not in state]
    extra = [name for name in state if name not in own and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in extra if not name.startswith(classifier)]
    if missing or unexpected:
        raise InputError(
            f"{source} do not fit this trunk ({_first(missing, 'missing')}; {_first(unexpected, 'unexpected')}): "
            "choose the trunk that they were made for"
        )
    # Converted Caffe files hold the vectors of batch normalisation as (1, C).
    wrong = [name for name, value in own.items() if state[name].squeeze().shape != value.squeeze().shape]
    if wrong:
        given, wanted = tuple(state[wrong[0]].shape), tuple(own[wrong[0]].shape)
        raise InputError(
            f"{source} do not fit this trunk ({wrong[0]} is {given}, not {wanted}; {len(wrong)} such shapes): "
            "choose the trunk that they were made for"
        )
    trunk.load_state_dict({name: state[name].reshape(value.shape) for name, value in own.items()}, strict=False)


def download(trunk: str, fetch: Callable[[], State], remedy: str) -> Callable[[], State]:
    """`fetch`, except that its failure is one sentence that ends with the `remedy`."""

    def fetch_or_say() -> State:
        try:
            return fetch()
        except Exception as error:  # each hub raises the errors of its own HTTP library
            reason = _brief(error)
        raise InputError(f"the ImageNet weights of {trunk} could not be downloaded ({reason}): {remedy}")

    return fetch_or_say


def _first(names: list[str], what: str) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} {what}: {shown}" if names else f"none {what}"


def _brief(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
