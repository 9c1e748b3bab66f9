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
def test_the_trigram_stands_beside_the_best_perplexity(make_run, make_record, ngrams, trained):
    records = [make_record(0, val_loss=math.log(21.5))] if trained else []
    for text in shown(make_run(records, meta={"ngrams": ngrams})):
        assert f"{'21.50' if trained else '-'} (trigram 18.00)" in text
    for text in shown(make_run(records)):
        assert ("21.50" in text) == trained
        assert "trigram" not in text
