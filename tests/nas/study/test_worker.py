"""What a worker does with a trial, and what the ledger says of its fold."""

import errno
import os
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
from nas.run.front import found_infeasible, front
from nas.run.ledger import deployed_of
from nas.study import worker
from nas.study.resolve import run_second, study_second
from nas.study.trials import Trials, TrialSpec
from nas.study.verify_fold import verified_form
from nas.study.worker import run_trial
from nas.training.trainer import TrainingRun
from search_spaces.architecture import arch_id
from search_spaces.deployed import deployed
from search_spaces.notation import parse
from tests.nas.study.conftest import ONE_TRIAL


@pytest.fixture
def spec(make_trials, source_files, tmp_path):
    return make_trials(tmp_path, prepare(source_files, vocab_size=512)).next_spec()


def test_what_trained_is_gone_before_a_fold_is_checked(spec, monkeypatch):
    runs, made = [], TrainingRun.__init__

    def observed(run, *args, **kwargs):
        runs.append(weakref.ref(run))
        made(run, *args, **kwargs)

    def verified(*_):
        assert [run() for run in runs] == [None]

    monkeypatch.setattr(TrainingRun, "__init__", observed)
    monkeypatch.setattr(worker, "verified_form", verified)
    assert list(run_trial(spec))[-1].status == "completed"


def test_a_look_pauses_at_the_first_rung_and_ends_as_if_it_had_not(spec, tmp_path):
    whole = list(run_trial(replace(spec, folder=tmp_path / "whole")))
    look = replace(spec, is_look=True)
    events = list(run_trial(look))
    assert [event.status for event in events] == ["running", "paused"]
    assert events[-1].reason == "looked at, after 25% of the tokens"
    assert events[-1].measured.val_loss == events[0].measured.val_loss
    assert list(run_trial(look))[-1] == events[-1]  # asked for again before it was written down
    assert list(run_trial(spec))[-1].measured.val_loss == whole[-1].measured.val_loss


def raising(error):
    def broken(*args, **kwargs):
        raise error

    return broken


def test_a_full_disk_halts_the_run(spec, monkeypatch):
    monkeypatch.setattr(worker, "train", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    (event,) = run_trial(spec)
    assert (event.event, event.status, event.halted) == (None, "failed", True)
    assert event.reason == f"trial {spec.trial_id} stops at {spec.folder}: No space left on device"


def test_a_candidate_that_cannot_be_trained_fails_with_the_reason_alone(spec, monkeypatch):
    monkeypatch.setattr(worker, "train", raising(UserError("`heads` must\n  divide.")))
    (event,) = run_trial(spec)
    assert (event.event, event.status, event.reason) == ("finished", "failed", "`heads` must divide.")
    assert not spec.folder.exists()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TypeError("no\n  len()"), "bug: TypeError: no len(); "),
        (ValueError("no"), "bug: ValueError: no; "),
        (RuntimeError("CUDA error"), "bug: RuntimeError: CUDA error; "),
        (KeyError(1), "bug: KeyError: 1; "),
        (AssertionError(), "bug: AssertionError; "),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "OSError: [Errno 5] Input/output error; "),
    ],
)
def test_anything_else_fails_the_trial_and_leaves_its_traceback(spec, monkeypatch, error, reason):
    monkeypatch.setattr("nas.training.objective.Objective.backward", raising(error))
    (event,) = run_trial(spec)
    assert (event.event, event.status, event.halted) == ("finished", "failed", False)
    path = spec.folder / "traceback.txt"
    assert event.reason == f"{reason}traceback in {path}"
    assert "in broken\n    raise error" in path.read_text()


def test_a_trial_that_memory_does_not_hold_fails_and_halts_nothing(spec, monkeypatch):
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr("nas.training.objective.Objective.backward", raising(error))
    (event,) = run_trial(spec)
    assert (event.event, event.status, event.halted) == ("finished", "failed", False)
    assert event.reason.startswith("out of memory on cpu with ")


def test_a_trial_over_its_time_fails_with_that_reason_and_keeps_what_it_has(spec):
    events = list(run_trial(replace(spec, timeout_s=1e-9)))
    assert [(event.event, event.status, event.reason) for event in events] == [
        ("finished", "failed", "over --trial-timeout 1e-09 s")
    ]
    assert not events[0].elsewhere
    assert list(spec.folder.rglob("optimizer.safetensors"))  # it could go on
    assert list(run_trial(replace(spec, timeout_s=600.0)))[-1].status == "completed"


def test_a_trial_that_hangs_ends_its_process(spec, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(worker, "HANGS_S", 0.05)
    monkeypatch.setattr("os._exit", lambda code: ended.set())
    monkeypatch.setattr(worker, "train", lambda *args, **kwargs: iter([]) if ended.wait(10) else None)
    assert list(run_trial(replace(spec, timeout_s=0.05)))[-1].status == "failed"
    assert ended.is_set()


def test_a_completed_trial_is_validated_on_the_second_corpus(spec):
    """The corpus it was trained on, as a second one, has the losses that it ended with."""
    *rungs, last = run_trial(replace(spec, second=spec.corpus))
    assert np.array(last.second) == pytest.approx(np.array(last.measured.documents))
    assert len(last.second) == len(spec.corpus.held_out.documents)
    assert all(event.second == () for event in rungs)


def test_a_second_corpus_is_the_users_or_that_of_the_builtin_parent(
    spec, source_files, make_meta, make_run, ngrams, tmp_path
):
    config, corpus = replace(ONE_TRIAL, data=source_files), spec.corpus
    assert study_second(config, corpus, None) is None
    assert study_second(replace(config, also_validate="none"), corpus, None) is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.py").write_text("".join(f"other_{index} = {index}\n" for index in range(200)))
    named = replace(config, also_validate=str(tmp_path / "other"))
    second = study_second(named, corpus, None)
    facts = SecondCorpus(
        data=second.data, fingerprint=second.fingerprint, held_out=second.held_out, ngrams=ngrams, parent_loss=None
    )
    run = replace(make_run(), meta=make_meta(second=facts))
    assert run_second(run, named, corpus, None) == second
    (tmp_path / "other" / "a.py").write_text("".join(f"changed_{index} = {index}\n" for index in range(200)))
    with pytest.raises(UserError, match="must be the one it was validated on, but its text has changed"):
        run_second(run, named, corpus, None)


def run(trials: Trials) -> TrialSpec:
    spec = trials.next_spec()
    assert spec is not None
    trials.started(spec)
    for event in run_trial(spec):
        trials.happened(spec, event)
    return spec


def test_the_ledger_holds_predicted_and_verified_prices(feasible, make_trials, corpus, tmp_path):
    spec = run(make_trials(tmp_path, corpus, anchors=["SM+R_i1"]))
    (record,) = ledger.completed(ledger.read(tmp_path / ledger.FILE_NAME))
    assert spec.deployed is not None
    assert (record.deployed_id, record.deployed) == (arch_id(spec.deployed), "1xoSoRo-1xoSooo")
    assert record.fold_holds
    assert record.left_unfolded == ()
    assert record.latency_s == record.predicted_latency_s == spec.prices.price.latency_s
    assert record.fold_logits_error < 1e-4
    assert deployed_of(record, feasible.space.base) == spec.deployed


def test_what_does_not_fold_is_paid_for(feasible, make_trials, corpus, tmp_path, monkeypatch):
    """A form with one FFN more than predicted, as an ill-conditioned one would leave."""

    def left_one(*args):
        verified = verified_form(*args)
        more = parse("1xoSoRo-1xoSoRo", feasible.space.base).architecture
        return replace(verified, architecture=deployed(more), left=("layers.1.ffn: for the test",))

    monkeypatch.setattr("nas.study.worker.verified_form", left_one)
    run(make_trials(tmp_path, corpus, anchors=["SM+R_i1"]))
    records = ledger.read(tmp_path / ledger.FILE_NAME)
    (record,) = ledger.completed(records)
    assert record.latency_s > record.predicted_latency_s
    assert record.left_unfolded == ("layers.1.ffn: for the test",)
    between = Budget(latency_s=(record.latency_s + record.predicted_latency_s) / 2)
    assert front(records, between) == ()
    assert found_infeasible(records, between) == (record,)
    assert found_infeasible(records, Budget(latency_s=record.predicted_latency_s / 2)) == ()  # under another budget
    assert [member.first for member in front(records, Budget(latency_s=record.latency_s))] == [record]


def test_as_written_nothing_is_folded(make_trials, corpus, tmp_path):
    run(make_trials(tmp_path, corpus, replace(ONE_TRIAL, accounting="written"), anchors=["SM+R_i1"]))
    (record,) = ledger.completed(ledger.read(tmp_path / ledger.FILE_NAME))
    assert (record.deployed, record.predicted_latency_s, record.fold_holds) == (None, None, None)
