"""What is shown while a run goes on."""

import math

import pytest
from rich.console import Console

from nas.report.progress import line, table
from nas.run.run import Run


def shown(run: Run) -> tuple[str, str]:
    """The line and the table of a run's progress."""
    console = Console(record=True, width=200)
    console.print(table(run, None))
    return line(run, None), console.export_text()


@pytest.mark.parametrize("trained", [True, False])
def test_the_trigram_stands_beside_the_best_perplexity(make_run, make_record, ngrams, trained) -> None:
    records = [make_record(0, val_loss=math.log(21.5))] if trained else []
    for text in shown(make_run(records, meta={"ngrams": ngrams})):
        assert f"{'21.50' if trained else '-'} (trigram 18.00)" in text
    for text in shown(make_run(records)):
        assert ("21.50" in text) == trained
        assert "trigram" not in text


def test_candidates_that_fail_early_do_not_take_the_place_of_final_trainings(make_run, make_record) -> None:
    failed = [make_record(index, status="failed", is_look=True, val_loss=None, perplexity=None) for index in (1, 2)]
    run = make_run([make_record(0), *failed], num_trials=2)
    assert line(run, None).startswith("3/4 ended (1 completed, 0 diverged, 2 failed)")
