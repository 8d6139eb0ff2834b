"""Loggers: what they are told of a training, each epoch once, also if the training was killed."""

import csv
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shortlist import ShortlistError
from shortlist.program.cli import main as cli
from shortlist.program.config import LoggerName, RunConfig, TrainConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.training.callbacks import Callback
from shortlist.program.training.loop import Interrupted, Trainer, train
from tests.support.early_ends import StopAfterStep
from tests.support.small_runs import config_arguments, outcome, small_config, write_embeddings

Told = dict[int, dict[str, float]]
"""Metrics by epoch."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embeddings(tmp_path_factory.mktemp("data") / "points.npz", images=100)


def settings(data: Path, *logger: LoggerName, epochs: int = 3) -> RunConfig:
    """With two steps an epoch."""
    return small_config(data, train=TrainConfig(epochs=epochs, batch_size=64, ks=(1, 3), device="cpu", logger=logger))


class Service:
    """Stands in for Weights & Biases and for MLflow, with the calls of their clients that are used here."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, dict[str, float]]] = []
        """Run, epoch and metrics, in the order of the calls."""
        self.settings: dict[str, Any] = {}
        self.statuses: list[str] = []
        self.fails = False

    def told(self) -> Told:
        """What it knows, if it was told of every epoch once and all for the same run."""
        assert len({run for run, _, _ in self.rows}) == 1
        epochs = [epoch for _, epoch, _ in self.rows]
        assert epochs == [*range(len(epochs))]
        return {epoch: metrics for _, epoch, metrics in self.rows}

    def log(self, run: str, epoch: int, metrics: dict[str, float]) -> None:
        if self.fails:
            raise ConnectionError("no route to host")
        self.rows.append((run, epoch, metrics))

    def wandb(self) -> dict[str, ModuleType]:
        def init(*, id: str, project: str, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(
                id=id,
                project=project,
                config=self.settings,
                log=lambda metrics, step: self.log(id, step, metrics),
                finish=lambda exit_code: self.statuses.append("failed" if exit_code else "success"),
            )

        return {"wandb": module("wandb", init=init, Settings=dict)}

    def mlflow(self) -> dict[str, ModuleType]:
        service = self

        class MlflowClient:
            def get_experiment_by_name(self, name: str) -> None: ...

            def create_experiment(self, name: str) -> str:
                return name

            def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
                return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment_id}-{len(service.statuses)}"))

            def update_run(self, run_id: str, status: str) -> None: ...

            def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
                if metrics:
                    service.log(run_id, metrics[0][3], {name: value for name, value, _, _ in metrics})
                service.settings.update(params)

            def set_terminated(self, run_id: str, status: str) -> None:
                service.statuses.append({"FINISHED": "success", "FAILED": "failed"}[status])

        def entity(*fields: Any) -> tuple[Any, ...]:
            return fields

        return {
            "mlflow": module("mlflow", MlflowClient=MlflowClient),
            "mlflow.entities": module("mlflow.entities", Metric=entity, Param=entity),
        }


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    made.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    return made


def told_by_csv(run: RunFolder) -> Told:
    with (run.path / "csv" / "metrics.csv").open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    epochs = [int(row.pop("step")) for row in rows]
    assert len(set(epochs)) == len(epochs)
    return dict(zip(epochs, rows, strict=True))


def told_by_tensorboard(run: RunFolder) -> Told:
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    told: Told = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in told.setdefault(event.step, {})
            told[event.step][name] = event.value
    return told


LOGGERS: tuple[LoggerName, ...] = ("tensorboard", "csv", "wandb", "mlflow")
every_logger = pytest.mark.parametrize("logger", LOGGERS)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    for name, stand_in in (service.wandb() | service.mlflow()).items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    return service


def told_of(logger: str, run: RunFolder, service: Service) -> Told:
    readers: dict[str, Callable[[], Told]] = {
        "csv": lambda: told_by_csv(run),
        "tensorboard": lambda: told_by_tensorboard(run),
    }
    return readers.get(logger, service.told)()


def assert_told(logger: str, run: RunFolder, service: Service) -> None:
    """The logger knows every metric of every epoch, once."""
    told = told_of(logger, run, service)
    lines = run.metrics()
    assert [*told] == [line["epoch"] for line in lines]
    for line in lines:
        known = {name: value for name, value in line.items() if name != "epoch" and value is not None}
        assert told[line["epoch"]] == pytest.approx(known, rel=1e-6)  # TensorBoard has float32


class Killed(Exception):  # noqa: N818 (it is what happened)
    pass


class Kill(Callback):
    """Ends the training without a word at a moment of its second epoch."""

    def __init__(self, moment: str) -> None:
        self._moment = moment

    def on_epoch_end(self, trainer: Trainer, line: dict[str, Any]) -> None:
        if self._moment == "before the checkpoint" and line["epoch"] == 1:
            raise Killed

    def on_checkpoint(self, trainer: Trainer) -> None:
        if self._moment == "after the checkpoint" and trainer.position.epoch == 2:
            raise Killed


@every_logger
@pytest.mark.parametrize("moment", ["before the checkpoint", "after the checkpoint"])
def test_a_run_that_was_killed_and_resumed_has_every_epoch_once(
    logger: LoggerName, moment: str, data: Path, tmp_path: Path, service: Service
) -> None:
    config = settings(data, logger)
    with pytest.raises(Killed):
        train(config, folder=tmp_path, quiet=True, callbacks=[Kill(moment)])
    run = train(config, folder=tmp_path, quiet=True, resume=True)
    assert_told(logger, run, service)
    if logger in ("wandb", "mlflow"):
        assert service.statuses == ["failed", "success"]
        assert service.settings["loss.k"] in (3, "3")


@pytest.mark.parametrize("logger", ["csv", "wandb", "mlflow"])
def test_a_logger_that_joins_a_resumed_run_learns_of_all_epochs(
    logger: LoggerName, data: Path, tmp_path: Path, service: Service
) -> None:
    with pytest.raises(Interrupted):
        train(settings(data), folder=tmp_path, quiet=True, callbacks=[StopAfterStep(5)])
    assert not {"tensorboard", "csv"} & {path.name for path in tmp_path.iterdir()}, "none was asked for"
    assert_told(logger, train(settings(data, logger), folder=tmp_path, quiet=True, resume=True), service)


def test_loggers_do_not_change_a_run_or_its_name(data: Path, tmp_path: Path, service: Service) -> None:
    plain, logged = settings(data), settings(data, *LOGGERS)
    assert plain.key() == logged.key()
    one, two = (train(config, folder=tmp_path / str(config.train.logger), quiet=True) for config in (plain, logged))
    assert outcome(one.path) == outcome(two.path)


def test_another_training_in_the_folder_is_another_run_of_the_service(
    data: Path, tmp_path: Path, service: Service
) -> None:
    run = train(settings(data, "wandb"), folder=tmp_path, quiet=True)
    for path in (run.path / "final.json", run.path / "best.safetensors", *(run.path / "checkpoints").iterdir()):
        path.unlink()
    (run.path / "checkpoints").rmdir()
    first = service.rows.copy()
    service.rows.clear()
    assert_told("wandb", train(settings(data, "wandb"), folder=tmp_path, quiet=True), service)
    assert service.rows[0][0] != first[0][0]


@pytest.mark.parametrize("logger", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_before_anything_is_done(
    logger: LoggerName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == logger else find(name))
    with pytest.raises(ShortlistError, match=f"pip install {logger}"):
        train(settings(tmp_path / "no.npz", "csv", logger), folder=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_training_needs_no_package_of_a_logger_that_is_not_asked_for(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("tensorboard", "torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)  # an import fails
    assert_told("csv", train(settings(data, "csv"), folder=tmp_path, quiet=True), Service())


@pytest.mark.parametrize("logger", ["wandb", "mlflow"])
def test_a_service_that_fails_costs_no_training(
    logger: LoggerName, data: Path, tmp_path: Path, service: Service
) -> None:
    service.fails = True
    with pytest.raises(ShortlistError, match=rf"{logger}.*no route to host.*--resume"):
        train(settings(data, logger), folder=tmp_path / "run", quiet=True)
    run = train(settings(data), folder=tmp_path / "run", quiet=True, resume=True)
    undisturbed = train(settings(data), folder=tmp_path / "other", quiet=True)
    assert outcome(run.path) == outcome(undisturbed.path)


@pytest.mark.parametrize("logger", [("csv", "csv"), ("cvs",)])
def test_other_loggers_are_refused(logger: Any) -> None:
    with pytest.raises(ShortlistError, match=r"train\.logger must be.*tensorboard, csv, wandb, mlflow"):
        TrainConfig(logger=logger)


def test_a_damaged_record_is_named(data: Path, tmp_path: Path, service: Service) -> None:
    with pytest.raises(Interrupted):
        train(settings(data, "wandb"), folder=tmp_path, quiet=True, callbacks=[StopAfterStep(3)])
    RunFolder(tmp_path).write_json("loggers.json", {"wandb": {"id": 7}})
    with pytest.raises(ShortlistError, match=r"loggers\.json is damaged.*wandb"):
        train(settings(data, "wandb"), folder=tmp_path, quiet=True, resume=True)


def test_the_command_line_takes_several_loggers(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Service
) -> None:
    words = ["--out", str(tmp_path / "run"), *config_arguments(settings(data, "csv", "wandb", epochs=1))]
    monkeypatch.setattr(sys, "argv", ["shortlist", "train", "embeddings", *words])
    cli.main()
    run = RunFolder.existing(tmp_path / "run")
    assert run.config.train.logger == ("csv", "wandb")
    for logger in ("csv", "wandb"):
        assert_told(logger, run, service)
