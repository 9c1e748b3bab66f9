import csv
import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import nas
from nas.api import Calls

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> nas.Run:
    return nas.load_run(shutil.copytree(ROOT / "tests/nas/run/stored/published", tmp_path / "run"))


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replay(callback: nas.Callback, run: nas.Run) -> None:
    """Everything a run calls, from its records. A callback that raises would warn, which is an error here."""
    calls = Calls([callback])
    calls.started(run.folder)
    for record in run.records:
        if record.event == "finished":
            calls.trial_ended(record)
    calls.ended()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_weights_and_biases(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    replay(example("wandb_callback").WandbCallback(), run)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_mlflow(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    replay(example("mlflow_callback").MlflowCallback(), run)
    (written,) = (tmp_path / "mlruns").glob("*/*/metrics/perplexity")
    logged = [float(row[1]) for row in csv.reader(written.read_text().splitlines(), delimiter=" ")]
    assert logged == [record.perplexity for record in run.records if record.event == "finished"]
