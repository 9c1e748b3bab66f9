"""The experiment on SmolLM2: what of it is computed once."""

from pathlib import Path

import pytest

from experiments import smollm2


def test_which_scores_hold_no_bound_is_kept_beside_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "load_parent", None)  # a model of half a gigabyte
    (tmp_path / "unheld.txt").write_text("1 5 29")
    assert smollm2._unheld(tmp_path / "parent") == (1, 5, 29)
