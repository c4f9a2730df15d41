"""`python -m paper`: lists the experiments of the paper, runs them, and writes the pages of results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paper.experiment import Setting
    from paper.workers import Outcome
    from xbm_app.data.images import Dataset
    from xbm_app.train.config import Config

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None, pretty_exceptions_enable=False)
DATA = typer.Option(
    "--data", help="NAME=DIR, a folder of images or a store made by `xbm prepare`; `glyphs` needs no folder; can be repeated"
)
DOCS = Path(__file__).parents[1] / "docs"
RESULTS_FOLDER = Path(__file__).parent / "results"
RESULTS_OPTION = typer.Option(help="folder of result files, one small JSON file per finished run", show_default="paper/results")


@dataclass(frozen=True)
class Machine:
    """Where data sets and weights are on this machine; none of it becomes part of a result.

    Attributes:
        data: folder of each data set, or of its store; None for the built-in glyphs.
        trunks: weights of each trunk: "imagenet", "none" or a path.
    """

    data: dict[str, Path | None]
    trunks: dict[str, str]

    def settings(self) -> "list[Setting]":
        """Every data set with every trunk."""
        from paper.experiment import setting_of
        from paper.record import NAMED

        trunks = {trunk: weights if weights in NAMED else Path(weights).name for trunk, weights in self.trunks.items()}
        pairs = trunks.items() or [(None, None)]
        return list(dict.fromkeys(setting_of(data, trunk, weights) for data in self.data for trunk, weights in pairs))

    def place(self, config: "Config") -> "Config":
        """A config with the paths of this machine."""
        from paper.record import NAMED
        from xbm_app.data.store import OUTLINE

        folder = self.data.get(config.data.name)
        stored = folder is not None and (folder / OUTLINE).exists()
        root, store = (None, str(folder)) if stored else (None if folder is None else str(folder), None)
        weights = config.model.weights if config.model.weights in NAMED else self.trunks[config.model.trunk]
        return replace(config, data=replace(config.data, root=root, store=store), model=replace(config.model, weights=weights))


def machine_of(data: Sequence[str], trunks: Sequence[str]) -> Machine:
    """Parses the command line's `cars=DIR`, `glyphs`, `resnet50_v1=FILE` and `efficientnet_lite0`."""
    from paper.experiment import SMALL
    from paper.record import NAMED
    from xbm.errors import InputError, unknown
    from xbm_app.train.presets import DATASETS

    folders: dict[str, Path | None] = {}
    for text in data:
        name, equals, folder = text.partition("=")
        if name not in DATASETS or name == "own":
            raise unknown("data set", name, [each for each in DATASETS if each != "own"])
        if not equals and name != "glyphs":
            raise InputError(f"--data {name} needs a folder: write --data {name}=DIR, images or a store made by `xbm prepare`")
        if equals and not Path(folder).is_dir():
            raise InputError(f"--data {text}: there is no folder {folder}")
        folders[name] = Path(folder).resolve() if equals else None
    if not folders:
        raise InputError("no data given: use --data cars=DIR or --data glyphs; `python -m paper run smoke` needs none")
    weights: dict[str, str] = {}
    for text in trunks:
        name, equals, file = text.partition("=")
        if equals and file not in NAMED and not Path(file).is_file():
            raise InputError(f"--trunk {text}: there is no file {file}")
        weights[name] = (file if file in NAMED else str(Path(file).resolve())) if equals else "imagenet"
    if weights and all(name in SMALL for name in folders):
        raise InputError(f"{', '.join(folders)}: always trained with a small network of their own, so leave out --trunk")
    return Machine(folders, weights)


def read_datasets(data: Sequence[str]) -> "dict[str, Dataset]":
    """The data sets that the command line names."""
    from paper.experiment import base, setting_of
    from xbm_app.train.dataset import read_data

    machine = machine_of(data, [])
    return {name: read_data(machine.place(base(setting_of(name))).data) for name in machine.data}


@app.callback()
def paper(context: typer.Context, results: Annotated[Path, RESULTS_OPTION] = RESULTS_FOLDER) -> None:
    """List the experiments, one per table or figure of the paper, and how many runs of each are finished.

    Example: `python -m paper`, then `python -m paper run s-table-3 --data cars=~/cars --trunk resnet50`, then
    `python -m paper report`
    """
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from paper.experiments import ALL
    from paper.page import settings_of
    from paper.record import Records
    from paper.study import Study
    from xbm_app.cli.tables import print_table

    records = Records(results)
    settings = settings_of(records)
    columns = ("experiment", "title", "in the paper", "finished runs")
    table = Table(*columns, caption="python -m paper run NAME --data cars=DIR [--trunk NAME]")
    for experiment in ALL.values():
        studies = [Study(experiment, setting, records) for setting in settings if experiment.suits(setting)]
        finished = {id(run) for study in studies for arm in study.arms for run in study.runs(arm)}
        table.add_row(experiment.name, experiment.title, experiment.source, str(len(finished)))
    table.add_row("smoke", "All of them in miniature, on the built-in glyphs", "", "")
    print_table(table)


@app.command()
def run(
    names: Annotated[list[str], typer.Argument(help="experiment names (see `python -m paper`), or smoke for a quick test")],
    data: Annotated[list[str] | None, DATA] = None,
    trunk: Annotated[
        list[str] | None, typer.Option(help="NAME, or NAME=WEIGHTS_FILE; default: googlenet; can be repeated")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="number of seeds on the test classes (default: 3, or as many as the experiment asks for)"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="number of runs in parallel; small runs can share a GPU")] = 1,
    budget: Annotated[
        float | None,
        typer.Option(min=1, help="seconds; runs that would not finish in time are not started, unfinished ones are stopped"),
    ] = None,
    results: Annotated[Path, RESULTS_OPTION] = RESULTS_FOLDER,
    runs: Annotated[Path, typer.Option(help="where run folders are written; interrupted runs are resumed")] = Path(
        "runs/paper"
    ),
) -> None:
    """Run experiments: choose learning rates on held-out training classes, then train and score on the test classes.

    Runs that are already in the results folder are not repeated, whichever experiment they belong to. You can interrupt this
    command at any time.

    Examples: `python -m paper run smoke` ·
    `python -m paper run s-table-3 --data cars=~/cars --trunk efficientnet_lite0 --jobs 3` ·
    `python -m paper run figure-1 batch-size --data cars=~/cars-store --trunk resnet50_v1=weights.safetensors --budget 540`
    """
    from paper.experiments import experiment
    from paper.record import Records
    from paper.study import plan
    from paper.workers import run_all
    from xbm.errors import InputError

    tell = partial(print, flush=True)
    if "smoke" in names:
        chosen = [experiment(name).name for name in names if name != "smoke"]
        outcome = run_smoke(runs / "smoke", chosen or None, tell=tell)
        print(runs / "smoke" / "results.md")
    else:
        experiments = [experiment(name) for name in names]
        machine = machine_of(data or [], trunk or [])
        records = Records(results)
        settings = machine.settings()
        first = plan(experiments, settings, seeds, records)
        if not (first.done or first.ready or first.waiting):
            raise InputError(f"{', '.join(names)}: not defined for this data; `python -m paper` lists all experiments")
        tell(f"{first.done} runs are finished, {len(first.ready)} can start, {first.waiting} wait for a learning rate")
        outcome = run_all(
            lambda: plan(experiments, settings, seeds, records),
            machine.place,
            records,
            runs,
            jobs,
            float("inf") if budget is None else budget,
            tell,
        )
    tell(f"{outcome.finished} runs made, {outcome.left} left")
    if outcome.failed:
        raise InputError(f"{len(outcome.failed)} runs failed; the first: {next(iter(outcome.failed.values()))}")


def run_smoke(out: Path, names: list[str] | None = None, tell: Callable[[str], None] = print) -> "Outcome":
    """Runs the named experiments, by default all of them, in miniature on the built-in glyphs, a few iterations per run, to
    test that everything works; writes results and pages under `out`."""
    from paper.experiment import GLYPHS, config_of
    from paper.experiments import ALL, DOCUMENTS
    from paper.page import write_page
    from paper.record import Records
    from paper.study import plan
    from paper.workers import run_all
    from xbm_app.data.glyphs import read_glyphs
    from xbm_app.data.parallel import default_workers

    glyphs = read_glyphs(size=config_of(GLYPHS, {}).data.resize)  # generated once, before several processes need them
    chosen = [ALL[name] for name in names or ALL]
    records = Records(out / "results")
    jobs = default_workers()  # at most 8: each of these processes loads torch
    outcome = run_all(lambda: plan(chosen, [GLYPHS], 1, records), lambda config: config, records, out / "runs", jobs, tell=tell)
    for document in DOCUMENTS:
        write_page(records, document, out, {"glyphs": glyphs}, mini=True)
    return outcome


@app.command()
def labels(data: Annotated[list[str] | None, DATA] = None, results: Annotated[Path, RESULTS_OPTION] = RESULTS_FOLDER) -> None:
    """Write the classes of the test queries beside the results: the bootstrap over test classes needs them, `report` no images.

    Example: `python -m paper labels --data cars=~/cars`
    """
    from paper.record import write_labels

    for dataset in read_datasets(data or []).values():
        print(write_labels(results, dataset))


@app.command()
def report(
    results: Annotated[Path, RESULTS_OPTION] = RESULTS_FOLDER,
    out: Annotated[Path, typer.Option(help="folder for the pages and their figures")] = DOCS,
    data: Annotated[list[str] | None, DATA] = None,
) -> None:
    """Write the pages of results and their figures, and the README's lines about them; with --data, contact sheets of
    photographs too. Those whose terms do not permit redistribution are drawn into runs/photographs, and not on the pages.

    Example: `python -m paper report` · `python -m paper report --data cars=~/cars`
    """
    from paper.claims import write_claims
    from paper.experiments import DOCUMENTS
    from paper.page import PRIVATE, redistributable, write_page
    from paper.readme import write_readme
    from paper.record import Records
    from xbm.errors import InputError

    records = Records(results)
    if not len(records):
        raise InputError(f"{results} contains no results: give the folder that `python -m paper run` writes to")
    datasets = read_datasets(data) if data else {}
    for document in DOCUMENTS:
        print(write_page(records, document, out, datasets))
    print(write_claims(records, out))
    if not all(map(redistributable, datasets)):
        print(PRIVATE)
    if out == DOCS and results == RESULTS_FOLDER:
        print(write_readme(records))


if __name__ == "__main__":
    from xbm_app.main import main

    main(lambda: app)
