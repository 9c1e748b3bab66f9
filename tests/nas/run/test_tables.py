"""The tables of a run: means and spread over seeds, and the floor."""

import csv
import math

import pytest

from nas.run.tables import write_tables

TRIGRAM = math.log(18)


@pytest.fixture
def tables(make_run):
    """Writes the tables of records and returns the rows of trials.csv and of pareto.csv."""

    def rows(records, ngrams=None) -> list[list[dict[str, str]]]:
        run = make_run(records, meta={"ngrams": ngrams})
        write_tables(run)
        return [
            list(csv.DictReader((run.folder / f"{name}.csv").read_text().splitlines())) for name in ("trials", "pareto")
        ]

    return rows


def test_a_trial_is_judged_by_its_own_loss_and_not_at_the_trigram(tables, make_record, ngrams) -> None:
    losses = (TRIGRAM + 1e-9, TRIGRAM, TRIGRAM)
    trials, _ = tables([make_record(index, val_loss=loss) for index, loss in enumerate(losses)], ngrams)
    assert [row["knows_less_than_trigram"] for row in trials] == ["True", "False", "False"]


def test_tables_have_the_floor_in_every_row_and_judge_a_member_by_its_mean(tables, over_seeds, ngrams) -> None:
    """One seed of the first is above the trigram, its mean is not; of the second it is the other way round."""
    below = over_seeds(0, TRIGRAM + 0.1, TRIGRAM - 0.3, latency_s=200.0)
    above = over_seeds(1, TRIGRAM - 0.1, TRIGRAM + 0.3, latency_s=100.0)
    trials, front = tables([*below, *above, *over_seeds(3, None)], ngrams)
    names = ("floor_unigram", "floor_bigram", "floor_trigram", "floor_4gram", "floor_5gram")
    for row in (*trials, *front):
        assert [float(row[name]) for name in names] == pytest.approx([200, 40, 18, 15, 14])
        assert row["floor_tokens"] == "524288"
    marks = {row["trial_id"]: row["knows_less_than_trigram"] for row in trials}
    assert marks == {
        "t0-s0-a0": "True", "t1-s0-a0": "False", "t3-s0-a0": "", "t0-s1-a0": "False", "t1-s1-a0": "True",
    }  # fmt: skip
    assert [(row["arch_id"], row["knows_less_than_trigram"]) for row in front] == [("a1", "True"), ("a0", "False")]


def test_a_trial_that_was_stopped_is_not_judged(tables, make_record, ngrams, tmp_path) -> None:
    trials, front = tables([make_record(0, val_loss=9.0, status="paused")], ngrams)
    assert [row["knows_less_than_trigram"] for row in trials] == [""]
    assert front == []
    header = (tmp_path / "pareto.csv").read_text()
    assert all(name in header for name in ("num_seeds", "within_noise", "floor_trigram", "knows_less_than_trigram"))


def test_tables_of_a_run_without_a_floor_have_no_such_columns(tables, over_seeds, tmp_path) -> None:
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
