"""What holds on a second corpus."""

import csv
import math
from dataclasses import replace

import pytest

from nas.corpus.held_out import HeldOut
from nas.report.html.page import page
from nas.report.summary import closing_lines
from nas.run.folder import SecondCorpus
from nas.run.members import members
from nas.run.second import holds_on_first_alone, rank_correlation, second_error, second_loss
from nas.run.tables import write_tables


def there(loss: float) -> tuple[tuple[float, float], ...]:
    return ((0.5, loss - 0.1), (0.5, loss + 0.1))


@pytest.fixture
def records(over_seeds):
    """Three members, cheapest first: better and better on the first corpus; on the second the last is not."""
    losses = ((3.0, 4.0), (2.8, 3.5), (2.6, 3.7))
    return [
        replace(record, second_documents=there(second))
        for index, (first, second) in enumerate(losses)
        for record in over_seeds(index, first, latency_s=100.0 + index)
    ]


def test_losses_there_are_means_over_seeds_and_documents(over_seeds):
    record, other = over_seeds(0, 3.0, 3.02)
    (member,) = members([replace(record, second_documents=there(4.0)), replace(other, second_documents=there(4.2))])
    assert second_loss(member) == pytest.approx(4.1)
    assert second_error(member) == pytest.approx(math.hypot(0.01, 0.1))
    (member,) = members([replace(record, second_documents=there(4.0)), other])
    assert second_loss(member) is None


def test_the_order_of_the_front_and_who_is_dominated_there(records, make_run):
    front = make_run(records).front
    # ranks 2, 1, 0 and 2, 0, 1: 1 - 6 (0 + 1 + 1) / (3 (9 - 1))
    assert rank_correlation(front) == pytest.approx(0.5)
    assert rank_correlation(front[:2]) is None
    assert [holds_on_first_alone(member, front) for member in front] == [False, False, True]
    wide = [replace(record, second_documents=((0.5, 3.0), (0.5, 4.4))) for record in records[2:]]
    assert not any(holds_on_first_alone(member, front) for member in make_run([*records[:2], *wide]).front)


def test_lines_and_tables_have_the_second_corpus(records, make_run, ngrams):
    second = SecondCorpus(data="other", fingerprint="f", held_out=HeldOut(), ngrams=ngrams, parent_loss=math.log(9))
    run = make_run(records, meta={"second": second})
    text = "\n".join(closing_lines(run, []))
    assert "1.70 min, 1.00 GB; on other 40.45, dominated there\n" in text
    assert (
        "second corpus other (fingerprint f): rank correlation of the front with the first 0.50; the parent 9.00"
        in text
    )
    assert "; on other 40.45, dominated there" in page(run)
    write_tables(run)
    rows = list(csv.DictReader((run.folder / "pareto.csv").read_text().splitlines()))
    assert [row["holds_on_first_alone"] for row in rows] == ["False", "False", "True"]
    assert float(rows[0]["second_perplexity"]) == pytest.approx(math.exp(4.0))
    assert float(rows[0]["second_floor_trigram"]) == pytest.approx(18)
    assert "second corpus" not in "\n".join(closing_lines(make_run(records), []))
