"""Where the metrics of a run go besides its CSV: TensorBoard, Weights & Biases, MLflow, behind one interface."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from xbm.errors import unknown
from xbm_app.extras import require
from xbm_app.train.config import Config, flat, to_dict

MLFLOW_RUN = "mlflow_run.txt"  # in the run folder: the identifier with which a resumed run continues
MLFLOW_TEXT = 500  # characters of a parameter that every MLflow server stores


class Tracker(Protocol):
    """A service that draws curves. To write one of your own, pass `on_log` to `xbm.train`."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Receives the figures of one step; those that are unknown are not among them."""

    def close(self, failed: bool) -> None:
        """Ends the run; `failed` if training was stopped by an error."""


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, config: Config, folder: Path, step: int) -> None:
        require("train", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases that is named after the run folder; a resumed run continues it."""

    def __init__(self, config: Config, folder: Path, step: int) -> None:
        require("wandb", "wandb")
        import wandb

        project, values = config.log.project, to_dict(config)
        self._run: Any = wandb.init(project=project, dir=str(folder), config=values, resume="allow", id=folder.name)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow in the experiment `log.project`, on the server or in the folder that MLFLOW_TRACKING_URI names."""

    def __init__(self, config: Config, folder: Path, step: int) -> None:
        require("mlflow", "mlflow")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient()
        kept = folder / MLFLOW_RUN
        if step and kept.exists():
            self._run = kept.read_text().strip()
            client.update_run(self._run, status="RUNNING")
            return
        known = client.get_experiment_by_name(config.log.project)
        experiment = client.create_experiment(config.log.project) if known is None else known.experiment_id
        self._run = client.create_run(experiment, run_name=folder.name).info.run_id
        settings = [Param(name, str(value)[:MLFLOW_TEXT]) for name, value in flat(config).items()]
        client.log_batch(self._run, params=settings)
        kept.write_text(self._run + "\n")

    def log(self, values: Mapping[str, float], step: int) -> None:
        import time

        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def open_trackers(config: Config, folder: Path, step: int) -> list[Tracker]:
    """The trackers of `log.trackers`, for a run that begins or resumes at `step`."""
    names = list(config.log.trackers)
    if config.log.wandb:
        warnings.warn("log.wandb=true is now log.trackers=tensorboard,wandb: change it", stacklevel=1)
        names.append("wandb")
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return [TRACKERS[name](config, folder, step) for name in dict.fromkeys(names)]
