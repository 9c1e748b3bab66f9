import csv
import math
from dataclasses import replace

import pytest

from nas.corpus.held_out import HeldOut
from nas.report.html.page import page
from nas.report.summary import closing_lines
from nas.run.folder import SecondCorpus
from nas.run.members import holds_on_first_alone, members, rank_correlation
from nas.run.tables import write_tables

TRIGRAM = math.log(18)


@pytest.fixture
def tables(make_run):
    """Writes the tables of records and returns the rows of trials.csv and of pareto.csv."""

    def rows(records, ngrams=None) -> list[list[dict[str, str]]]:
        run = make_run(records, meta={"ngrams": ngrams})
        write_tables(run)
        paths = (run.folder / f"{name}.csv" for name in ("trials", "pareto"))
        return [list(csv.DictReader(path.read_text().splitlines())) for path in paths]

    return rows


def test_a_trial_is_judged_by_its_own_loss_unless_it_was_stopped(tables, make_record, ngrams, tmp_path):
    losses = (TRIGRAM + 1e-9, TRIGRAM, TRIGRAM)
    trials, _ = tables([make_record(index, val_loss=loss) for index, loss in enumerate(losses)], ngrams)
    assert [row["knows_less_than_trigram"] for row in trials] == ["True", "False", "False"]
    trials, front = tables([make_record(0, val_loss=9.0, status="paused")], ngrams)
    assert [row["knows_less_than_trigram"] for row in trials] == [""]
    assert front == []
    header = (tmp_path / "pareto.csv").read_text()
    assert all(name in header for name in ("num_seeds", "within_noise", "floor_trigram", "knows_less_than_trigram"))


def test_tables_have_the_floor_in_every_row_and_judge_a_member_by_its_mean(tables, over_seeds, ngrams):
    """One seed of the first is above the trigram, its mean is not; of the second it is the other way round."""
    below = over_seeds(0, TRIGRAM + 0.1, TRIGRAM - 0.3, latency_s=200.0)
    above = over_seeds(1, TRIGRAM - 0.1, TRIGRAM + 0.3, latency_s=100.0)
    trials, front = tables([*below, *above, *over_seeds(3, None)], ngrams)
    names = ("floor_unigram", "floor_bigram", "floor_trigram", "floor_4gram", "floor_5gram")
    for row in (*trials, *front):
        assert [float(row[name]) for name in names] == pytest.approx([200, 40, 18, 15, 14])
        assert row["floor_tokens"] == "524288"
    marks = [(row["trial_id"][:5], row["knows_less_than_trigram"]) for row in trials]
    assert marks == [("t0-s0", "True"), ("t1-s0", "False"), ("t3-s0", ""), ("t0-s1", "False"), ("t1-s1", "True")]
    assert [(row["arch_id"], row["knows_less_than_trigram"]) for row in front] == [("a1", "True"), ("a0", "False")]


def test_tables_of_a_run_without_a_floor_have_no_such_columns(tables, over_seeds, tmp_path):
    tables(over_seeds(0, 3.0, 3.1))
    assert "gram" not in (tmp_path / "trials.csv").read_text() + (tmp_path / "pareto.csv").read_text()


def test_tables_have_means_and_spread(tables, over_seeds):
    records = [*over_seeds(0, 3.0, 3.1, latency_s=100.0), *over_seeds(1, 2.95, latency_s=200.0), *over_seeds(2, None)]
    trials, rows = tables(records)
    assert [row["trial_id"] for row in trials] == ["t0-s0-a0", "t1-s0-a0", "t2-s0-a0", "t0-s1-a0"]
    assert [row["num_seeds"] for row in trials] == ["2", "1", "", "2"]
    assert [float(row["perplexity"]) for row in rows] == pytest.approx([math.exp(3.05), math.exp(2.95)])
    deviation = 0.1 / math.sqrt(2)
    assert [float(row["standard_error"]) for row in rows] == pytest.approx([deviation / math.sqrt(2), deviation])
    assert [row["within_noise"] for row in rows] == ["False", "True"]
    assert rows[0]["nats_below_neighbour"] == rows[0]["neighbour_error"] == ""
    assert float(rows[1]["nats_below_neighbour"]) == pytest.approx(0.1)
    assert float(rows[1]["neighbour_error"]) == pytest.approx(deviation * math.sqrt(1.5))
    assert (rows[0]["trial_id"], rows[0]["perplexity_low"] < rows[0]["perplexity_high"]) == ("t0-s0-a0", True)


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
    assert member.second_loss == pytest.approx(4.1)
    assert member.second_error == pytest.approx(math.hypot(0.01, 0.1))
    (member,) = members([replace(record, second_documents=there(4.0)), other])
    assert member.second_loss is None


def test_the_order_of_the_front_and_who_is_dominated_there(records, make_run):
    front = make_run(records).front
    # ranks 2, 1, 0 and 2, 0, 1: 1 - 6 (0 + 1 + 1) / (3 (9 - 1))
    assert rank_correlation(front) == pytest.approx(0.5)
    assert rank_correlation(front[:2]) is None
    assert rank_correlation([front[0]] * 3) is None
    assert rank_correlation([front[0], front[0], front[1]]) == pytest.approx(1.0)  # ties share their mean rank
    assert [holds_on_first_alone(member, front) for member in front] == [False, False, True]
    wide = [replace(record, second_documents=((0.5, 3.0), (0.5, 4.4))) for record in records[2:]]
    assert not any(holds_on_first_alone(member, front) for member in make_run([*records[:2], *wide]).front)


def test_lines_and_tables_have_the_second_corpus(records, make_run, ngrams):
    second = SecondCorpus(data="other", fingerprint="f", held_out=HeldOut(), ngrams=ngrams, parent_loss=math.log(9))
    run = make_run(records, meta={"second": second})
    text = "\n".join(closing_lines(run, []))
    assert "1.70 min, 1.00 GB; on other 40.45, dominated there\n" in text
    assert "second corpus other (fingerprint f): rank correlation of the front with the first 0.50; the paren" in text
    assert "; on other 40.45, dominated there" in page(run)
    write_tables(run)
    rows = list(csv.DictReader((run.folder / "pareto.csv").read_text().splitlines()))
    assert [row["holds_on_first_alone"] for row in rows] == ["False", "False", "True"]
    assert float(rows[0]["second_perplexity"]) == pytest.approx(math.exp(4.0))
    assert float(rows[0]["second_floor_trigram"]) == pytest.approx(18)
    assert "second corpus" not in "\n".join(closing_lines(make_run(records), []))
