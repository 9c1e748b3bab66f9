from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from experiments import search_baseline
from experiments.__main__ import KINDS, definitions, run
from nas.results import ledger

SETTINGS = decode(
    search_baseline.Settings,
    {key: value for key, value in load_mapping(definitions()["search-baseline"]).items() if key != "kind"},
    "experiment search-baseline",
)


def test_every_experiment_has_a_known_kind():
    assert {load_mapping(path)["kind"] for path in definitions().values()} <= set(KINDS)


def test_an_unknown_experiment_is_refused_by_name():
    with pytest.raises(ValueError, match="experiment must be one of .*search-baseline"):
        run("moon")


def test_the_table_has_a_row_per_seed_and_per_generation():
    curves = {(searcher, seed): [1.0, 2.0 + seed] for searcher in ("evolution", "random") for seed in range(5)}
    console = Console(record=True, width=100)
    for table in search_baseline.tables(SETTINGS, curves):
        console.print(table)
    text = console.export_text()
    assert "6.000" in text  # seed 4 at the end
    assert "4.000 (1.414)" in text  # mean and spread of 2, 3, 4, 5, 6


def test_a_study_runs_small_with_equal_tokens_and_resumes(tmp_path: Path):
    small = replace(SETTINGS, num_trials=4, tokens=8192)
    curve = search_baseline.study(small, "random", 0, tmp_path)
    records = ledger.finished(ledger.read(tmp_path / ledger.FILE_NAME))
    assert len(records) == 4
    assert len({record.tokens for record in records if record.status == "completed"}) == 1
    assert curve == search_baseline.study(small, "random", 0, tmp_path)  # from the ledger, nothing trained again
