"""What is said of the floor while a run goes on."""

import math

from rich.console import Console

from costmodel.cost import Budget
from nas.report.ngram_lines import KNOWS_LESS, mark, ngram_lines
from nas.report.progress import line, table
from nas.results.front import summarise

BUDGET = Budget(latency_s=300.0)


def shown(summary, ngrams) -> tuple[str, str]:
    """The line and the table of a run's progress."""
    console = Console(record=True, width=200)
    console.print(table(summary, 5, None, ngrams))
    return line(summary, 5, None, ngrams=ngrams), console.export_text()


def test_progress_has_the_trigram_beside_the_best_perplexity(make_record, ngrams) -> None:
    for text in shown(summarise([make_record(0, val_loss=math.log(21.5))], BUDGET, (300.0, 5.0)), ngrams):
        assert "21.50 (trigram 18.00)" in text
    for text in shown(summarise([], BUDGET, (300.0, 5.0)), ngrams):
        assert "- (trigram 18.00)" in text


def test_without_a_floor_there_is_none(make_record) -> None:
    for text in shown(summarise([make_record(0, val_loss=math.log(21.5))], BUDGET, (300.0, 5.0)), None):
        assert "21.50" in text
        assert "trigram" not in text
    assert ngram_lines(None) == []


def test_only_a_loss_above_the_trigram_is_marked(ngrams) -> None:
    assert mark(math.log(18) + 1e-9, ngrams) == KNOWS_LESS
    assert mark(math.log(18), ngrams) == ""
    assert mark(9.0, None) == ""
