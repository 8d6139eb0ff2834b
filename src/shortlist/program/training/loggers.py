"""Loggers, ``train.logger``: where the metrics of each epoch go beside ``metrics.jsonl``.

A run that was killed trains some of its epochs again. No logger may then show an epoch twice: TensorBoard hides the
earlier events, the CSV file is written anew, and services are told of an epoch only after its checkpoint.
"""

import importlib.util
import os
import secrets
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_fabric.loggers.csv_logs import CSVLogger
from lightning_fabric.loggers.logger import Logger

from shortlist.errors import ShortlistError
from shortlist.program.config import LoggerName, flat, to_dict
from shortlist.program.runs.checks import is_text, is_whole
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.callbacks import Callback

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from shortlist.program.training.loop import Trainer

PROJECT = "shortlist"
"""The project of Weights & Biases and the experiment of MLflow, unless the environment names another."""
RECORD = "loggers.json"
"""What services were told of the run: its id there, and the number of epochs."""
_PACKAGES: Mapping[LoggerName, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def refuse_missing_loggers(names: Sequence[LoggerName]) -> None:
    """Raise an error if a logger needs a package that is not installed."""
    for name in names:
        if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ShortlistError(
                f"train.logger = {name} needs the package {_PACKAGES[name]}: pip install {_PACKAGES[name]}, or leave "
                f"{name} out"
            )


def build_loggers(run: RunFolder, names: Sequence[LoggerName]) -> list[Callback]:
    """The callbacks that write to these loggers. Packages are imported when training starts."""
    makers: dict[LoggerName, Callable[[], Callback]] = {
        "tensorboard": lambda: TensorBoard(run),
        "csv": lambda: CSVFile(run),
        "wandb": lambda: ServiceLog(run, "wandb", WandbLogger),
        "mlflow": lambda: ServiceLog(run, "mlflow", MLFlowLogger),
    }
    return [makers[name]() for name in names]


def _values(line: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an epoch. Those that are not defined are left out."""
    return {name: value for name, value in line.items() if name != "epoch" and value is not None}


class TensorBoard(Callback):
    """The metrics of each epoch as events in the run folder.

    Lightning's TensorBoardLogger is not used: it expands ``$`` and ``~`` in the path, and hides that a disk is full.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._writer: SummaryWriter | None = None

    def on_fit_start(self, trainer: "Trainer") -> None:
        from torch.utils.tensorboard import SummaryWriter

        with self._run.writing_logs("tensorboard") as path:
            # Hides earlier events of epochs that are trained again.
            self._writer = SummaryWriter(str(path), purge_step=trainer.position.epoch)

    def on_epoch_end(self, trainer: "Trainer", line: dict[str, Any]) -> None:
        assert self._writer is not None
        with self._run.writing_logs("tensorboard"):
            for name, value in _values(line).items():
                self._writer.add_scalar(name, value, line["epoch"])
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with self._run.writing_logs("tensorboard"):
                self._writer.close()


class CSVFile(Callback):
    """The metrics of each epoch as a row of ``csv/metrics.csv`` in the run folder; the column ``step`` is the epoch."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._logger = CSVLogger(run.path, name="csv", version="")

    def on_fit_start(self, trainer: "Trainer") -> None:
        with self._run.writing_logs("csv") as path:
            (path / "metrics.csv").unlink(missing_ok=True)  # it may have epochs that are trained again
            for line in trainer.position.lines:
                self._logger.log_metrics(_values(line), line["epoch"])
            self._logger.save()

    def on_epoch_end(self, trainer: "Trainer", line: dict[str, Any]) -> None:
        with self._run.writing_logs("csv"):
            self._logger.log_metrics(_values(line), line["epoch"])
            self._logger.save()


class ServiceLog(Callback):
    """The metrics of each epoch for a logger that keeps them outside of the run folder.

    What it was told cannot be taken back. So it is told of an epoch when the checkpoint of the epoch is written, and
    ``loggers.json`` says how many it knows. A process that is killed between the two loses an epoch there.

    Args:
        run: The run.
        name: The logger's name in the settings.
        start: Starts the logger, for a run with this id there, or for a new one if the id is empty.
    """

    def __init__(self, run: RunFolder, name: str, start: Callable[[RunFolder, str], Logger]) -> None:
        self._run, self._name, self._start = run, name, start
        self._logger: Logger | None = None
        self._id, self._epochs, self._status = "", 0, "failed"

    def on_fit_start(self, trainer: "Trainer") -> None:
        if trainer.position.epoch or trainer.position.step:  # otherwise the record is that of another training
            known = self._read().get(self._name, {})
            self._id, self._epochs = known.get("id", ""), known.get("epochs", 0)
        with self._explained():
            self._logger = self._start(self._run, self._id)
            if not self._id:
                self._logger.log_hyperparams(flat(to_dict(trainer.config)))
        self._id = str(self._logger.version)
        self._write()
        self._log(trainer.position.lines)

    def on_checkpoint(self, trainer: "Trainer") -> None:
        self._log(trainer.position.lines)

    def on_fit_end(self, trainer: "Trainer") -> None:
        self._status = "success"

    def close(self) -> None:
        if self._logger is not None:
            with self._explained():
                self._logger.finalize(self._status)

    def _log(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Tell the logger of the epochs that it does not know."""
        assert self._logger is not None
        for line in lines[self._epochs :]:
            self._epochs += 1
            self._write()
            with self._explained():
                self._logger.log_metrics(_values(line), line["epoch"])

    def _read(self) -> dict[str, Any]:
        return self._run.read_record(RECORD, **{self._name: _is_record}) if self._run.has(RECORD) else {}

    def _write(self) -> None:
        self._run.write_json(RECORD, self._read() | {self._name: {"id": self._id, "epochs": self._epochs}})

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an error of the logger's package, of whatever type, into one that names the remedy."""
        try:
            yield
        except Exception as error:
            offline = "; WANDB_MODE=offline needs neither a network nor an account" if self._name == "wandb" else ""
            raise ShortlistError(
                f"the logger {self._name} has failed ({type(error).__name__}: {error}): give the command again with "
                f"--resume, if need be without it in --train.logger{offline}"
            ) from error


class WandbLogger(Logger):
    """Weights & Biases, by its own client.

    Its variables apply: ``WANDB_PROJECT``, ``WANDB_DIR``, ``WANDB_MODE=offline``.
    """

    def __init__(self, run: RunFolder, known_id: str) -> None:
        import wandb

        # Not in the run folder: the client makes links, which a run folder must not contain.
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=known_id or secrets.token_hex(4),
            name=run.path.resolve().name,
            resume="allow",
            settings=wandb.Settings(console="off"),
        )

    @property
    def name(self) -> str:
        return str(self._run.project)

    @property
    def version(self) -> str:
        return str(self._run.id)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._run.log(metrics, step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self._run.config.update(params)

    def finalize(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "success" else 1)


class MLFlowLogger(Logger):
    """MLflow, by its own client.

    Its variables apply: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``. Without, it keeps a local data base.
    """

    def __init__(self, run: RunFolder, known_id: str) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if known_id:
            self._id = known_id
            self._client.update_run(known_id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(self._experiment)
        experiment_id = known.experiment_id if known else self._client.create_experiment(self._experiment)
        created = self._client.create_run(experiment_id, run_name=run.path.resolve().name)
        self._id = str(created.info.run_id)

    @property
    def name(self) -> str:
        return self._experiment

    @property
    def version(self) -> str:
        return self._id

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, now, step or 0) for name, value in metrics.items()]
        )

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        from mlflow.entities import Param

        settings = params if isinstance(params, dict) else vars(params)
        self._client.log_batch(self._id, params=[Param(name, str(value)) for name, value in settings.items()])

    def finalize(self, status: str) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if status == "success" else "FAILED")


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and is_text(value.get("id")) and is_whole(value.get("epochs"))
