from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor


@pytest.fixture
def source_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of 30 small Python files; what is prepared of it is cached in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(30):
        (folder / f"m{index}.py").write_text(f"def f{index}(a, b):\n    return a * {index} + b\n" * 40)
    return str(folder)


@pytest.fixture(scope="session")
def some_tokens() -> Callable[..., Tensor]:
    """`some_tokens(length=9)`: two sequences of tokens, the same in every call with the same arguments."""

    def draw(vocab_size: int = 40, *, length: int = 11, seed: int = 1) -> Tensor:
        return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))

    return draw
