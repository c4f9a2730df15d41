"""What a Python program adds to a run: a transform of its own, and functions that are called during training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xbm.errors import InputError
from xbm_app.data.transforms import Transform, describe
from xbm_app.train.config import Config

OnLog = Callable[[Mapping[str, float]], object]
OnEvaluate = Callable[[int, Mapping[str, float]], object]


@dataclass(frozen=True)
class Hooks:
    """Functions of the caller. With several processes, only the first one calls `on_log` and `on_evaluate`.

    Attributes:
        transform: applied to every training image; `data.transform` in the config describes it.
        on_log: called with each row of metrics: "step", "loss", "lr", ...
        on_evaluate: called after each evaluation on held-out classes with the iterations so far and the scores.
    """

    transform: Transform | None = None
    on_log: OnLog | None = None
    on_evaluate: OnEvaluate | None = None

    @property
    def described(self) -> str | None:
        return None if self.transform is None else describe(self.transform)

    def check(self, config: Config) -> None:
        """Refuses another transform than that of the config, and one that would have no effect."""
        recorded, own = config.data.transform, self.described
        if recorded is not None and own is None:
            raise InputError(f"this run has a transform, {recorded}: pass it from Python, xbm.train(..., transform=...)")
        if recorded != own:
            raise InputError(f"this run has {recorded or 'no transform'}, the transform passed is {own}: pass the same one")
        if own is not None and config.model.freeze == "trunk":
            raise InputError(
                "a frozen trunk sees every image once, without augmentation: omit transform, or model.freeze=trunk"
            )


NO_HOOKS = Hooks()
