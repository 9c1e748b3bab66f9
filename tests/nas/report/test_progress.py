import math
from io import StringIO

import pytest
from rich.console import Console

from costmodel.commands.output import console
from nas.report.progress import line, share_progress, table
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


def test_candidates_that_fail_early_do_not_take_the_place_of_final_trainings(make_run, make_record):
    failed = [make_record(index, status="failed", is_proxy=True, val_loss=None, perplexity=None) for index in (1, 2)]
    run = make_run([make_record(0), *failed], num_trials=2)
    assert line(run, None).startswith("3/4 ended (1 completed, 0 diverged, 2 failed)")


def test_progress_is_told_in_lines_where_no_terminal_shows_a_bar(monkeypatch):
    now = iter((0.0, 20.0, 60.0, 70.0))
    monkeypatch.setattr("nas.report.progress.time.monotonic", lambda: next(now))
    file = StringIO()
    with share_progress(Console(file=file), "training") as tell:
        for share in (0.1, 0.25, 0.5):
            tell(share)
    assert file.getvalue() == "training: 25%, ETA 3.00 min\n"


def test_brackets_and_colons_are_printed_as_they_are(capsys):
    console().print("runs/[b]one[/b]:warning:")
    assert capsys.readouterr().out == "runs/[b]one[/b]:warning:\n"
