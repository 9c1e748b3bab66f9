import errno
import os
import shutil
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from costmodel.cost import Budget
from costmodel.errors import UserError
from nas.corpus.corpus import prepare
from nas.run import ledger
from nas.run.folder import SecondCorpus
from nas.run.ledger import deployed_of
from nas.run.members import found_infeasible, front
from nas.study import worker
from nas.study.resolve import run_second, study_second
from nas.study.trials import RunHaltedError
from nas.study.worker import run_trial, verified_form
from nas.training.trainer import TrainingRun
from search_spaces.architecture import arch_id
from search_spaces.deployed import deployed
from search_spaces.notation import parse
from tests.nas.study.conftest import ONE_TRIAL


@pytest.fixture
def trial(make_trials, source_files, tmp_path):
    return make_trials(tmp_path, prepare(source_files, vocab_size=512)).next_trial()


def test_a_training_has_the_seed_of_its_record_and_is_gone_before_a_fold_is_checked(trial, monkeypatch):
    runs, made = [], TrainingRun.__init__
    trial = replace(trial, record=replace(trial.record, seed=5))

    def observed(run, *args, **kwargs):
        runs.append((weakref.ref(run), kwargs["seed"]))
        made(run, *args, **kwargs)

    def verified(*_):
        assert [(run(), seed) for run, seed in runs] == [(None, 5)]

    monkeypatch.setattr(TrainingRun, "__init__", observed)
    monkeypatch.setattr(worker, "verified_form", verified)
    assert list(run_trial(trial))[-1].status == "completed"


def test_an_evaluation_pauses_at_the_first_rung_and_ends_as_a_training_in_one_go(trial, tmp_path):
    whole = list(run_trial(replace(trial, setting=replace(trial.setting, folder=tmp_path / "whole"))))
    look = replace(trial, record=replace(trial.record, is_proxy=True))
    records = list(run_trial(look))
    assert [record.status for record in records] == ["running", "paused"]
    assert records[-1].reason == "low-fidelity evaluation, after 25% of the tokens"
    assert records[-1].val_loss == records[0].val_loss
    assert list(run_trial(look))[-1] == records[-1]  # asked for again before it was written down
    assert list(run_trial(trial))[-1].val_loss == whole[-1].val_loss


def raising(error):
    def broken(*args, **kwargs):
        raise error

    return broken


def test_a_full_disk_halts_the_run(trial, monkeypatch):
    monkeypatch.setattr(worker, "train", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(RunHaltedError) as raised:
        list(run_trial(trial))
    assert str(raised.value) == f"trial {trial.record.trial_id} stops at {trial.folder}: No space left on device"


def test_a_candidate_that_cannot_be_trained_fails_with_the_reason_alone(trial, monkeypatch):
    monkeypatch.setattr("nas.training.objective.Objective.backward", raising(MemoryError()))
    (record,) = run_trial(trial)
    assert (record.event, record.status) == ("finished", "failed")
    assert record.reason.startswith("out of memory on cpu with ")
    shutil.rmtree(trial.folder)
    monkeypatch.setattr(worker, "train", raising(UserError("`heads` must\n  divide.")))
    (record,) = run_trial(trial)
    assert (record.event, record.status, record.reason) == ("finished", "failed", "`heads` must divide.")
    assert not trial.folder.exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TypeError("no\n  len()"), "bug: TypeError: no len(); "),
        (ValueError("no"), "bug: ValueError: no; "),
        (RuntimeError("CUDA error"), "bug: RuntimeError: CUDA error; "),
        (AssertionError(), "bug: AssertionError; "),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "OSError: [Errno 5] Input/output error; "),
    ],
)
def test_anything_else_fails_the_trial_and_leaves_its_traceback(trial, monkeypatch, error, reason):
    monkeypatch.setattr("nas.training.objective.Objective.backward", raising(error))
    (record,) = run_trial(trial)
    assert (record.event, record.status) == ("finished", "failed")
    path = trial.folder / "traceback.txt"
    assert record.reason == f"{reason}the traceback is in {path}"
    assert "in broken\n    raise error" in path.read_text()


def with_timeout(trial, timeout_s):
    config = replace(trial.setting.config, trial_timeout=f"{timeout_s:.2e}s")
    return replace(trial, setting=replace(trial.setting, config=config))


def test_a_trial_over_its_time_fails_with_that_reason_and_keeps_what_it_has(trial):
    (record,) = run_trial(with_timeout(trial, 1e-9))
    assert (record.event, record.status, record.reason) == ("finished", "failed", "over --trial-timeout 1e-09 s")
    assert list(trial.folder.rglob("optimizer.safetensors"))  # it could go on
    assert list(run_trial(with_timeout(trial, 600.0)))[-1].status == "completed"


def test_a_trial_that_hangs_ends_its_process(trial, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(worker, "HANGS_S", 0.05)
    monkeypatch.setattr("os._exit", lambda code: ended.set())
    monkeypatch.setattr(worker, "train", lambda *args, **kwargs: iter([]) if ended.wait(10) else None)
    assert list(run_trial(with_timeout(trial, 0.05)))[-1].status == "failed"
    assert ended.is_set()


def test_a_completed_trial_is_validated_on_the_second_corpus(trial):
    """The corpus it was trained on, as a second one, has the losses that it ended with."""
    corpus = trial.setting.corpus
    *rungs, last = run_trial(replace(trial, setting=replace(trial.setting, second=corpus)))
    assert np.array(last.second_documents) == pytest.approx(np.array(last.documents))
    assert len(last.second_documents) == len(corpus.held_out.documents)
    assert all(record.second_documents == () for record in rungs)


def test_a_second_corpus_is_the_users_or_none(trial, source_files, make_meta, make_run, ngrams, tmp_path):
    config, corpus = replace(ONE_TRIAL, data=source_files), trial.setting.corpus
    assert study_second(config, corpus, None) is None
    assert study_second(replace(config, second_eval_data="none"), corpus, None) is None
    (path := tmp_path / "other" / "a.py").parent.mkdir()
    path.write_text("".join(f"other_{index} = {index}\n" for index in range(200)))
    named = replace(config, second_eval_data=str(tmp_path / "other"))
    second = study_second(named, corpus, None)
    known = {name: getattr(second, name) for name in ("data", "fingerprint", "held_out")}
    facts = SecondCorpus(**known, ngrams=ngrams, parent_loss=None)
    run = replace(make_run(), meta=make_meta(second=facts))
    assert run_second(run, named, corpus, None) == second
    path.write_text("".join(f"changed_{index} = {index}\n" for index in range(200)))
    with pytest.raises(UserError, match="must be the one it was validated on, but its text has changed"):
        run_second(run, named, corpus, None)


@pytest.fixture
def trained(make_trials, corpus, tmp_path):
    """Trains a member, and returns its trial and the records of the ledger."""

    def train(config=ONE_TRIAL):
        trials = make_trials(tmp_path, corpus, config, initial=["SM+R_i1"])
        trial = trials.next_trial()
        trials.started(trial)
        for record in run_trial(trial):
            trials.happened(record)
        return trial, ledger.read(trials.path)

    return train


def test_the_ledger_holds_predicted_and_verified_prices(feasible, trained):
    trial, records = trained()
    (record,) = ledger.completed(records)
    by_rule = deployed(trial.member.architecture)
    assert (record.deployed_id, record.deployed) == (arch_id(by_rule), "1xoSoRo-1xoSooo")
    assert record.fold_holds
    assert record.left_unfolded == ()
    assert record.latency_s == record.predicted_latency_s == trial.record.latency_s
    assert record.fold_logits_error < 1e-4
    assert deployed_of(record, feasible.space.base) == by_rule


def test_what_does_not_fold_is_paid_for(feasible, trained, monkeypatch):
    """A form with one FFN more than predicted, as an ill-conditioned one would leave."""

    def left_one(*args):
        verified = verified_form(*args)
        more = parse("1xoSoRo-1xoSoRo", feasible.space.base).architecture
        return replace(verified, architecture=deployed(more), left=("layers.1.ffn: for the test",))

    monkeypatch.setattr("nas.study.worker.verified_form", left_one)
    _, records = trained()
    (record,) = ledger.completed(records)
    assert record.latency_s > record.predicted_latency_s
    assert record.left_unfolded == ("layers.1.ffn: for the test",)
    between = Budget(latency_s=(record.latency_s + record.predicted_latency_s) / 2)
    assert front(records, between) == ()
    assert found_infeasible(records, between) == (record,)
    assert found_infeasible(records, Budget(latency_s=record.predicted_latency_s / 2)) == ()  # under another budget
    assert [member.first for member in front(records, Budget(latency_s=record.latency_s))] == [record]


def test_as_written_nothing_is_folded(trained):
    (record,) = ledger.completed(trained(replace(ONE_TRIAL, cost_of="unfolded"))[1])
    assert (record.deployed, record.predicted_latency_s, record.fold_holds) == (None, None, None)
