from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nas.report.html.made_runs import write_run, write_whole_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run's folder of records; further arguments are those of `write_run`."""
    return lambda records, **rest: write_run(tmp_path / "run", records, **rest)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_whole_run(tmp_path / "run")
