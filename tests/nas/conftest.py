from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nas.run.config import StudyConfig
from nas.run.ledger import Record
from nas.run.run import Run


@pytest.fixture
def source_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of 30 small Python files; what is prepared of it is cached in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(30):
        (folder / f"m{index}.py").write_text(f"def f{index}(a, b):\n    return a * {index} + b\n" * 40)
    return str(folder)


@pytest.fixture
def make_run(make_meta, tmp_path: Path) -> Callable[..., Run]:
    """Makes a run of records, with 5 minutes a token; meta: changes of what `make_meta` says; the rest of the study."""

    def make(records: Iterable[Record] = (), *, meta: dict[str, Any] | None = None, **config: Any) -> Run:
        study = StudyConfig(**{"budget_latency": "5min", **config})
        return Run(folder=tmp_path, config=study, meta=make_meta(**(meta or {})), records=tuple(records))

    return make


@pytest.fixture(scope="session")
def some_tokens() -> Callable[..., Tensor]:
    """`some_tokens(length=9)`: two sequences of tokens, the same in every call with the same arguments."""

    def draw(vocab_size: int = 40, *, length: int = 11, seed: int = 1) -> Tensor:
        return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))

    return draw
