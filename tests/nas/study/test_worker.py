import errno
import os
from dataclasses import replace

import pytest

from nas.corpus.corpus import prepare
from nas.study import worker
from nas.study.config import StudyConfig
from nas.study.searcher import SEARCHERS, Result, TrialSchedule
from nas.study.trials import Trials, TrialSetting
from nas.study.worker import run_trial

CONFIG = StudyConfig(budget_latency="25s", space="tiny", scale="smoke", seq_len=16, tokens=1024)


@pytest.fixture
def spec(feasible, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for index in range(30):
        (text / f"m{index}.py").write_text(f"def f{index}(a, b):\n    return a * {index} + b\n" * 40)
    corpus = prepare(str(text), vocab_size=512, cache_dir=tmp_path / "cache")
    schedule = TrialSchedule(strategy=SEARCHERS["random"](feasible, ()), seed=0, num_trials=1)
    setting = TrialSetting(config=CONFIG, folder=tmp_path, corpus=corpus, device="cpu", threads=1, versions={})
    return Trials(schedule, feasible.priced.pricer, setting).next_spec()


def with_rivals(spec, *rivals):
    return replace(spec, rivals=rivals)


def test_a_trial_reports_its_rungs_and_its_end(spec):
    events = list(run_trial(spec))
    assert [event.event for event in events] == ["rung", "rung", "rung", "finished"]
    assert events[-1].status == "completed"
    assert events[-1].measured.tokens == 1024


def test_a_dominated_trial_is_stopped_at_its_first_rung_and_keeps_only_weights(spec):
    rival = Result(index=0, status="completed", latency_s=0.0, log_perplexity=0.0, rung_losses=(0.0, 0.0, 0.0))
    events = list(run_trial(with_rivals(spec, rival)))
    assert [event.status for event in events] == ["running", "stopped"]
    assert "dominated in price and loss at rung 0, after 25% of the tokens" in events[-1].reason
    assert not list(spec.folder.rglob("optimizer.safetensors"))
    assert list(run_trial(with_rivals(spec, rival)))[-1] == events[-1]  # resumed: the same decision again


def test_a_dearer_rival_stops_nothing(spec):
    rival = Result(index=0, status="completed", latency_s=1e9, log_perplexity=0.0, rung_losses=(0.0, 0.0, 0.0))
    assert list(run_trial(with_rivals(spec, rival)))[-1].status == "completed"


@pytest.mark.parametrize(
    ("error", "halted"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (OSError(errno.EIO, os.strerror(errno.EIO)), False),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("no"), False),
    ],
)
def test_a_full_disk_halts_the_run_and_anything_else_fails_the_trial(spec, monkeypatch, error, halted):
    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(worker, "train", broken)
    (event,) = run_trial(spec)
    assert (event.status, event.halted) == ("failed", halted)
    assert event.reason


def test_a_trial_that_memory_does_not_hold_fails_and_halts_nothing(spec, monkeypatch):
    def exhausted(*args, **rest):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("nas.training.objective.Objective.backward", exhausted)
    (event,) = run_trial(spec)
    assert (event.event, event.status, event.halted) == ("finished", "failed", False)
    assert event.reason.startswith("out of memory on cpu with ")
