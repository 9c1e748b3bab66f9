"""A completed trial is folded, and what that is verified to cost is what the ledger counts."""

from dataclasses import replace
from pathlib import Path

from costmodel.cost import Budget
from nas.corpus.corpus import Corpus
from nas.run import ledger
from nas.run.front import found_infeasible, front
from nas.run.ledger import deployed_of
from nas.study.trials import Trial, Trials
from nas.study.verify_fold import verified_form
from nas.study.worker import run_trial
from search_spaces.architecture import arch_id
from search_spaces.deployed import deployed
from search_spaces.notation import parse
from tests.nas.study.conftest import ONE_TRIAL


def run(trials: Trials) -> Trial:
    trial = trials.next_trial()
    assert trial is not None
    trials.started(trial)
    for record in run_trial(trial):
        trials.happened(record)
    return trial


def test_the_ledger_holds_predicted_and_verified_prices(feasible, make_trials, corpus: Corpus, tmp_path: Path) -> None:
    trial = run(make_trials(tmp_path, corpus, anchors=["SM+R_i1"]))
    (record,) = ledger.completed(ledger.read(tmp_path / ledger.FILE_NAME))
    by_rule = deployed(trial.member.architecture)
    assert (record.deployed_id, record.deployed) == (arch_id(by_rule), "1xoSoRo-1xoSooo")
    assert record.fold_holds
    assert record.left_unfolded == ()
    assert record.latency_s == record.predicted_latency_s == trial.record.latency_s
    assert record.fold_logits_error is not None
    assert record.fold_logits_error < 1e-4
    assert deployed_of(record, feasible.space.base) == by_rule


def test_what_does_not_fold_is_paid_for(feasible, make_trials, corpus: Corpus, tmp_path: Path, monkeypatch) -> None:
    """A form with one FFN more than predicted, as an ill-conditioned one would leave."""

    def left_one(*args):
        verified = verified_form(*args)
        more = parse("1xoSoRo-1xoSoRo", feasible.space.base).architecture
        return replace(verified, architecture=deployed(more), left=("layers.1.ffn: for the test",))

    monkeypatch.setattr("nas.study.worker.verified_form", left_one)
    run(make_trials(tmp_path, corpus, anchors=["SM+R_i1"]))
    records = ledger.read(tmp_path / ledger.FILE_NAME)
    (record,) = ledger.completed(records)
    assert record.predicted_latency_s is not None
    assert record.latency_s > record.predicted_latency_s
    assert record.left_unfolded == ("layers.1.ffn: for the test",)
    between = Budget(latency_s=(record.latency_s + record.predicted_latency_s) / 2)
    assert front(records, between) == ()
    assert found_infeasible(records, between) == (record,)
    assert found_infeasible(records, Budget(latency_s=record.predicted_latency_s / 2)) == ()  # under another budget
    assert [member.first for member in front(records, Budget(latency_s=record.latency_s))] == [record]


def test_as_written_nothing_is_folded(make_trials, corpus: Corpus, tmp_path: Path) -> None:
    run(make_trials(tmp_path, corpus, replace(ONE_TRIAL, accounting="written"), anchors=["SM+R_i1"]))
    (record,) = ledger.completed(ledger.read(tmp_path / ledger.FILE_NAME))
    assert (record.deployed, record.predicted_latency_s, record.fold_holds) == (None, None, None)
