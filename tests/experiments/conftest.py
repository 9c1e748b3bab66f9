from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from experiments import trainings
from tests.conftest import write_text


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file to train on; experiments run in the test's own folder, their trainings in threads, which start at once."""
    path = write_text(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainings, "ProcessPoolExecutor", lambda **_: ThreadPoolExecutor(1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    yield str(path)
    torch.set_num_threads(threads)
