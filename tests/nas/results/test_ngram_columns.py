"""Columns of the floor in tables."""

import csv
import math
from pathlib import Path

import pytest

from costmodel.cost import Budget
from nas.results.ngram_columns import ngram_columns
from nas.results.tables import write_tables
from search_spaces.bases import base_architecture

TRIGRAM = math.log(18)


def tables(folder: Path, records, ngrams) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The rows of trials.csv and of pareto.csv."""
    write_tables(folder, records, Budget(latency_s=300.0), base_architecture("tiny"), ngrams)
    trials, front = (
        list(csv.DictReader((folder / name).read_text().splitlines())) for name in ("trials.csv", "pareto.csv")
    )
    return trials, front


def test_only_what_is_above_the_trigram_knows_less(ngrams) -> None:
    columns = ngram_columns([TRIGRAM + 1e-9, TRIGRAM, None], ngrams)
    assert columns["knows_less_than_trigram"] == [True, False, None]
    assert ngram_columns([9.0], None) == {}


def test_tables_have_the_floor_in_every_row_and_judge_a_member_by_its_mean(tmp_path: Path, over_seeds, ngrams) -> None:
    """One seed of the first is above the trigram, its mean is not; of the second it is the other way round."""
    below = over_seeds(0, TRIGRAM + 0.1, TRIGRAM - 0.3, latency_s=200.0)
    above = over_seeds(1, TRIGRAM - 0.1, TRIGRAM + 0.3, latency_s=100.0)
    trials, front = tables(tmp_path, [*below, *above, *over_seeds(3, None)], ngrams)
    names = ("floor_unigram", "floor_bigram", "floor_trigram", "floor_4gram", "floor_5gram")
    for row in (*trials, *front):
        assert [float(row[name]) for name in names] == pytest.approx([200, 40, 18, 15, 14])
        assert row["floor_tokens"] == "524288"
    marks = {row["trial_id"]: row["knows_less_than_trigram"] for row in trials}
    assert marks == {
        "t0-s0-a0": "True", "t1-s0-a0": "False", "t3-s0-a0": "", "t0-s1-a0": "False", "t1-s1-a0": "True",
    }  # fmt: skip
    assert [(row["arch_id"], row["knows_less_than_trigram"]) for row in front] == [("a1", "True"), ("a0", "False")]


def test_a_trial_that_was_stopped_is_not_judged(tmp_path: Path, make_record, ngrams) -> None:
    trials, front = tables(tmp_path, [make_record(0, val_loss=9.0, status="stopped")], ngrams)
    assert [row["knows_less_than_trigram"] for row in trials] == [""]
    assert front == []
    header = (tmp_path / "pareto.csv").read_text()
    assert all(name in header for name in ("num_seeds", "within_noise", "floor_trigram", "knows_less_than_trigram"))


def test_tables_of_a_run_without_a_floor_have_no_such_columns(tmp_path: Path, over_seeds) -> None:
    tables(tmp_path, over_seeds(0, 3.0, 3.1), None)
    assert "gram" not in (tmp_path / "trials.csv").read_text() + (tmp_path / "pareto.csv").read_text()
