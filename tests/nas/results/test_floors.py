"""Trials against the floor, and its columns in tables."""

import csv
import math
from pathlib import Path

import pytest

from nas.results import ledger
from nas.results.floors import floor_columns, knows_less_than_trigram


def test_only_a_completed_trial_above_the_trigram_knows_less(make_record, floors) -> None:
    trigram = math.log(18)
    assert knows_less_than_trigram(make_record(val_loss=trigram + 1e-9), floors)
    assert not knows_less_than_trigram(make_record(val_loss=trigram), floors)
    assert not knows_less_than_trigram(make_record(val_loss=9.0, status="stopped"), floors)
    assert not knows_less_than_trigram(make_record(val_loss=None, perplexity=None, status="diverged"), floors)
    assert not knows_less_than_trigram(make_record(val_loss=9.0), None)


def test_tables_have_the_floor_in_every_row(tmp_path: Path, make_record, floors) -> None:
    path = tmp_path / "trials.csv"
    records = [make_record(0, val_loss=3.0), make_record(1, val_loss=2.0), make_record(2, status="stopped")]
    ledger.write_csv(path, records, floor_columns(floors))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    names = ("floor_unigram", "floor_bigram", "floor_trigram", "floor_4gram", "floor_5gram")
    for row in rows:
        assert [float(row[name]) for name in names] == pytest.approx([200, 40, 18, 15, 14])
        assert row["floor_tokens"] == "524288"
    assert [row["knows_less_than_trigram"] for row in rows] == ["True", "False", ""]


def test_tables_of_a_run_without_a_floor_have_no_such_columns(tmp_path: Path, make_record) -> None:
    path = tmp_path / "trials.csv"
    ledger.write_csv(path, [make_record(0)], floor_columns(None))
    assert "gram" not in path.read_text()
