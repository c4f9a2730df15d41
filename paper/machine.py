"""What `python -m paper run` is told about a machine: where data sets and weights lie. None of it enters a result."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paper.experiment import SMALL, Setting, setting_of
from paper.record import NAMED
from xbm.errors import InputError, unknown
from xbm_app.data.store import OUTLINE
from xbm_app.train.config import Config
from xbm_app.train.presets import DATASETS


@dataclass(frozen=True)
class Machine:
    """Attributes:
    data: folder of each data set, or of its store; None for the built-in glyphs.
    trunks: weights of each trunk: "imagenet", "none" or a path.
    """

    data: dict[str, Path | None]
    trunks: dict[str, str]

    def settings(self, mini: bool = False) -> list[Setting]:
        """Every data set with every trunk; little drawings have a trunk of their own."""
        found = []
        for data in self.data:
            for trunk, weights in (self.trunks or {None: None}).items():  # type: ignore[dict-item]
                setting = setting_of(data, trunk, weights if weights is None or weights in NAMED else Path(weights).name)
                found.append(replace(setting, mini=mini))
        return list(dict.fromkeys(found))

    def place(self, config: Config) -> Config:
        """A config with this machine's paths in it."""
        where = self.data.get(config.data.name)
        stored = where is not None and (where / OUTLINE).exists()
        data = replace(config.data, root=None if stored or where is None else str(where), store=str(where) if stored else None)
        model = config.model
        if model.weights not in NAMED:
            model = replace(model, weights=self.trunks[model.trunk])
        return replace(config, data=data, model=model)


def machine_of(data: Sequence[str], trunks: Sequence[str]) -> Machine:
    """From what the command line was given: `cars=DIR`, `glyphs`, `resnet50_v1=FILE`, `efficientnet_lite0`."""
    places: dict[str, Path | None] = {}
    for text in data:
        name, equals, where = text.partition("=")
        if name not in DATASETS or name == "own":
            raise unknown("data set", name, [each for each in DATASETS if each != "own"])
        if not equals and name != "glyphs":
            raise InputError(
                f"--data {name} needs to know where it is: write --data {name}=DIR, images or a store of `xbm prepare`"
            )
        if equals and not Path(where).is_dir():
            raise InputError(f"--data {text}: there is no folder {where}")
        places[name] = Path(where).resolve() if equals else None
    if not places:
        raise InputError("say which data to run on: --data cars=DIR, or --data glyphs; `python -m paper run smoke` needs none")
    weights: dict[str, str] = {}
    for text in trunks:
        name, equals, file = text.partition("=")
        if equals and file not in NAMED and not Path(file).is_file():
            raise InputError(f"--trunk {text}: there is no file {file}")
        weights[name] = (file if file in NAMED else str(Path(file).resolve())) if equals else "imagenet"
    if weights and all(name in SMALL for name in places):
        raise InputError(f"{', '.join(places)} are trained with a small net of their own: leave --trunk out")
    return Machine(places, weights)
