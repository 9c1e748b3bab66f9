from collections.abc import Callable
from pathlib import Path

import pytest

from nas.report.html.page import write_report
from nas.run.run import Run
from tests.nas.report.html.made_runs import write_run, write_whole_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run's folder of records; further arguments are those of `write_run`."""
    return lambda records, **rest: write_run(tmp_path / "run", records, **rest)


@pytest.fixture(scope="session")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that tests leave as it is, its page in it."""
    folder = write_whole_run(tmp_path_factory.mktemp("whole") / "run")
    write_report(Run.read(folder))
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_whole_run(tmp_path / "run")
