import errno
import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from costmodel.errors import UserError
from nas.corpus.corpus import Corpus
from nas.corpus.held_out import HeldOut
from nas.recipe.distillation import DistillationSchedule
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.ledger import Record
from nas.searchers import trellis
from nas.study.schedule import GENERATION_SIZE
from nas.study.trials import MAX_LOSSES, Trial, Trials
from nas.training.outcome import EntropySummary, Outcome, RungRecord

CONFIG = StudyConfig(
    budget_latency="25s", space="tiny", scale="smoke", seq_len=16, num_trials=6, num_proxy_evals=0, finalist_seeds=0
)
SIZES: dict[str, Any] = {"vocab_size": 512, "num_train_tokens": 10_000, "num_validation_tokens": 1_000}
NAMES: dict[str, Any] = {"folder": "corpus", "data": "stdlib", "fingerprint": "f" * 16, "tokenizer": "bpe-512"}
CORPUS = Corpus(held_out=HeldOut(), unigram_loss=5.0, **NAMES, **SIZES)


@pytest.fixture
def trials_in(make_trials, monkeypatch):
    """Makes the trials of a run in a folder, which it makes too, its ledger replayed; of few draws each."""
    monkeypatch.setattr(trellis, "NUM_DRAWS", 1)
    monkeypatch.setattr(trellis, "NUM_RANDOM", 2)

    def make(folder: Path, records=(), config=CONFIG, distillation: DistillationSchedule | None = None) -> Trials:
        folder.mkdir(exist_ok=True)
        return make_trials(folder, CORPUS, config, records=records, distillation=distillation)

    return make


ENTROPY = EntropySummary(head_means=((1.0, 2.0),), num_collapsed=0, quarter_shares=(0.0, 0.5, 0.0, 0.5))
Report = Callable[[Trial], Record]  # what a worker reports of a trial
OUTCOME = Outcome(status="completed", steps=8, tokens=64, seconds=2.0, val_loss=3.0, perplexity=20.0, entropy=ENTROPY)


def rung_record(index: int, val_loss: float) -> RungRecord:
    return RungRecord(
        rung=index, share=0.5, steps=4, tokens=32, val_loss=val_loss, perplexity=val_loss, entropy=ENTROPY, seconds=1.0
    )


def rung(trial: Trial, val_loss: float = 4.0) -> Record:
    return trial.at_rung(rung_record(0, val_loss))


def done(trial: Trial) -> Record:
    return trial.ended("completed", measured=OUTCOME)


def failed(trial: Trial) -> Record:
    return trial.ended("failed", "no corpus")


def evaluated(trial: Trial, val_loss: float = 4.0) -> Record:
    return trial.ended("paused", "looked at", measured=rung_record(0, val_loss))


def unless_evaluated(end: Report) -> Report:
    return lambda trial: (evaluated if trial.record.is_proxy else end)(trial)


def next_trial(trials: Trials, *reports: Report) -> Trial:
    """The next trial, started where something is to happen to it."""
    trial = trials.next_trial()
    assert trial is not None
    if reports:
        trials.started(trial)
    for report in reports:
        trials.happened(report(trial))
    return trial


def noisy(trial: Trial) -> Record:
    """An end whose loss depends on candidate and seed alone, or what was seen of it at the first rung."""
    loss = 3.0 + random.Random(trial.record.trial_id).gauss(0, 0.2)
    if trial.record.is_proxy:
        return evaluated(trial, loss)
    return trial.ended("completed", measured=replace(OUTCOME, val_loss=loss, perplexity=math.exp(loss)))


def run_until(trials: Trials, stop_after: int = 100) -> list[Trial]:
    """Two trials at a time, the later of which ends first; the last ones may be left without an end."""
    handed: list[Trial] = []
    running: list[Trial] = []
    while True:
        while len(running) < 2 and len(handed) < stop_after and (trial := trials.next_trial()) is not None:
            handed.append(trial)
            trials.started(trial)
            trials.happened(rung(trial))
            running.append(trial)
        if not running or len(handed) == stop_after:
            return handed
        trials.happened(noisy(running.pop()))


def ends(path: Path) -> list[tuple[object, ...]]:
    return [(end.trial_id, end.role, end.status, end.val_loss) for end in ledger.finished(ledger.read(path))]


def events(trials: Trials) -> list[str]:
    """Events of a ledger, but for proposals."""
    return [record.event for record in ledger.read(trials.path) if record.event != "proposed"]


def test_a_rung_reported_again_by_a_resumed_trial_is_recorded_once(trials_in, tmp_path):
    trials = trials_in(tmp_path)
    next_trial(trials, rung, rung)
    assert events(trials) == ["started", "rung"]


LOOKING, SEEDED = replace(CONFIG, num_trials=2, num_proxy_evals=None), replace(CONFIG, finalist_seeds=2)


@pytest.mark.parametrize(("config", "num_trials"), [(CONFIG, 6), (LOOKING, 8), (SEEDED, 8)])
def test_a_run_that_is_killed_anywhere_trains_the_same(trials_in, tmp_path, config, num_trials):
    whole = trials_in(tmp_path / "whole", config=config)
    handed = run_until(whole)
    assert whole.finished
    assert len(handed) >= num_trials
    for stop_after in range(1, len(handed) + 1):
        folder = tmp_path / str(stop_after)
        killed = trials_in(folder, config=config)
        before = run_until(killed, stop_after)
        resumed = trials_in(folder, ledger.recover(killed.path), config=config)
        after = run_until(resumed)
        assert after[0].record.trial_id in {trial.record.trial_id for trial in before}  # what had begun goes on
        assert resumed.finished
        assert ends(killed.path) == ends(whole.path)


def test_an_evaluated_candidate_is_promoted_as_the_same_trial(trials_in, tmp_path):
    trials = trials_in(tmp_path, config=LOOKING)
    handed = run_until(trials)
    looks, (first, second) = (
        [trial.record.trial_id for trial in handed if trial.record.is_proxy is proxy] for proxy in (True, False)
    )
    assert len(set(looks)) == len(looks) == 6
    assert first not in looks  # there is a front as soon as can be
    assert second in looks
    statuses = [record.status for record in ledger.finished(ledger.read(trials.path))]
    assert (statuses.count("paused"), statuses.count("completed")) == (5, 2)
    proposed = [record for record in ledger.read(trials.path) if record.event == "proposed"]
    assert [proposal.is_proxy for proposal in proposed].count(False) == 2
    assert all(proposal.expected_loss is not None for proposal in proposed)


def test_an_evaluation_stands_where_its_final_training_failed(trials_in, tmp_path):
    trials = trials_in(tmp_path, config=LOOKING)
    while (trial := next_trial(trials, rung, unless_evaluated(failed))).record.is_proxy:
        pass
    resumed = trials_in(tmp_path, ledger.read(trials.path), config=LOOKING)
    again = next_trial(resumed)
    while again.record.index != trial.record.index:
        again = next_trial(resumed)
    assert not again.record.is_proxy


def test_an_evaluation_whose_rung_was_cut_out_of_the_ledger_is_refused(trials_in, tmp_path):
    trials = trials_in(tmp_path, config=LOOKING)
    while not next_trial(trials, rung, unless_evaluated(done)).record.is_proxy:
        pass
    records = [record for record in ledger.read(trials.path) if record.event != "rung"]
    with pytest.raises(UserError, match=r"trial .*-s0-a0 of .*trials.jsonl must have a rung before it pauses; restore"):
        run_until(trials_in(tmp_path, records, config=LOOKING))


def test_what_is_proposed_is_in_the_ledger_before_it_is_started(trials_in, tmp_path):
    trials = trials_in(tmp_path)
    first = next_trial(trials)
    assert [(record.event, record.index) for record in ledger.read(trials.path)] == [
        ("proposed", index) for index in range(GENERATION_SIZE)
    ]
    assert ledger.read(trials.path)[0].trial_id == first.record.trial_id
    trials.started(first)
    next_trial(trials_in(tmp_path, ledger.read(trials.path)))
    assert [record.event for record in ledger.read(trials.path)] == ["proposed"] * GENERATION_SIZE + ["started"]


def test_proposals_of_another_version_stand_on_resume(trials_in, tmp_path):
    whole = trials_in(tmp_path / "whole", config=replace(CONFIG, seed=7))
    handed = [trial.record.trial_id for trial in run_until(whole)]
    proposed = [record for record in ledger.read(whole.path) if record.event == "proposed"]
    records = [replace(proposal, seed=0) for proposal in proposed[:4]]  # as if seed 0 had proposed them
    resumed = [trial.record.trial_id for trial in run_until(trials_in(tmp_path, records))]
    assert [name.replace("-s0", "-s7") for name in resumed[:4]] == handed[:4]
    assert len(set(resumed)) == len(resumed) == CONFIG.num_trials


def test_a_trial_that_lost_its_worker_goes_on_until_it_has_lost_too_many(trials_in, tmp_path):
    trials = trials_in(tmp_path)
    trial = next_trial(trials)
    for _ in range(MAX_LOSSES):
        trials.lost(trial, "the worker process died")
        assert trials.next_trial() is trial
    trials.happened(rung(trial))  # from here on they count anew
    for _ in range(MAX_LOSSES + 1):
        trials.started(trial)
        trials.lost(trial, "the worker process died")
        assert not trials.finished
        again = next_trial(trials)
        assert (again.key == trial.key) == (trials.running.get(trial.key) is again)
    record = ledger.read(trials.path)[-1]
    assert (record.status, record.reason) == ("failed", f"the worker process died, {MAX_LOSSES + 1} times")
    assert again.key != trial.key  # the run goes on


def test_whether_a_verified_cost_is_within_the_budget_reaches_the_schedule(trials_in, tmp_path):
    trials = trials_in(tmp_path)
    for latency_s in (25.0, 25.1):
        trial = next_trial(trials)
        trials.happened(replace(done(trial), latency_s=latency_s))
        assert trials.schedule.results[trial.key].feasible == (latency_s == 25.0)


def test_a_failure_that_another_node_may_not_have_is_tried_anew(trials_in, tmp_path):
    trials = trials_in(tmp_path)
    trial = next_trial(trials)
    trials.started(trial)
    trials.happened(failed(trial), again=True)
    anew = next_trial(trials, done)
    assert (anew.key, anew.record.trial_id) == (trial.key, trial.record.trial_id.replace("-a0", "-a1"))
    assert [record.status for record in ledger.finished(trials.records)] == ["completed"]


def test_enough_failures_stop_the_run_and_a_divergence_is_none(trials_in, tmp_path):
    trials = trials_in(tmp_path, config=replace(CONFIG, max_failures=2))
    for end in (failed, lambda trial: trial.ended("diverged", "non-finite loss"), failed):
        assert trials.halted is None
        trial = next_trial(trials, end)
    assert trials.halted == f"2 trials failed (--max-failures), the last, {trial.record.trial_id}: no corpus"
    assert [record.status for record in ledger.finished(ledger.read(trials.path))] == ["failed", "diverged", "failed"]


def test_a_failure_is_tried_again_on_resume_under_another_name(trials_in, tmp_path):
    trials = trials_in(tmp_path)
    trial = next_trial(trials, failed)
    again = next_trial(trials_in(tmp_path, ledger.read(trials.path)))
    assert (again.key, again.record.trial_id) == (trial.key, trial.record.trial_id.replace("-a0", "-a1"))


def test_a_failure_that_later_proposals_depend_on_is_final(trials_in, tmp_path):
    config = replace(CONFIG, num_trials=12)
    trials = trials_in(tmp_path, config=config)
    next_trial(trials, failed)
    run_until(trials, 9)  # the eighth is of generation 2, proposed knowing that the first had failed
    resumed = run_until(trials_in(tmp_path, ledger.read(trials.path), config=config))
    assert {trial.record.index for trial in resumed} == {8, 9, 10, 11}


def test_a_halt_records_no_end_so_the_trial_is_resumable(trials_in, tmp_path):
    trials = trials_in(tmp_path)
    trial = next_trial(trials)
    trials.started(trial)
    trials.halt("disk full")
    trials.happened(done(trial))
    trials.lost(trial, "the worker process died")
    assert trials.halted == "disk full"
    assert events(trials) == ["started"]


def test_a_ledger_of_other_candidates_is_refused(trials_in, tmp_path, make_record):
    trials = trials_in(tmp_path, (make_record(0, candidate_id="0" * 12),))
    with pytest.raises(ValueError, match="must be candidate .* the ledger holds 000000000000"):
        trials.next_trial()


def test_records_carry_price_and_provenance(trials_in, tmp_path):
    trials = trials_in(tmp_path)
    run_until(trials)
    record = ledger.read(trials.path)[-1]
    assert record.latency_s <= 25.0
    assert (record.corpus, record.tokenizer, record.split) == (CORPUS.fingerprint, "bpe-512", "validation")
    assert (record.protocol, record.cost_model_id, record.scale, record.width) == ("toy", "0", "smoke", 8)
    assert (record.steps, record.tokens, record.seconds, record.flags) == (8, 64, 2.0, ENTROPY.flags)


def test_a_disk_that_fills_up_at_any_write_loses_nothing(trials_in, tmp_path, monkeypatch):
    run_until(whole := trials_in(tmp_path / "whole"))
    write, writes = os.write, 0

    def filling(descriptor: int, data: bytes) -> int:
        nonlocal writes
        writes += 1
        if writes > remaining:
            written = write(descriptor, data[: len(data) // 2])  # the disk takes half of it, and then no more
            return written if written and writes == remaining + 1 else full()
        return write(descriptor, data)

    def full() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for remaining in (0, 1, 3, 8, 15):
        folder = tmp_path / str(remaining)
        writes, before = 0, trials_in(folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", filling)
            while before.halted is None:
                run_until(before)
        assert before.halted == f"cannot write {before.path}: No space left on device"
        records = ledger.read(before.path)  # not torn
        run_until(trials_in(folder, records))
        assert ends(before.path) == ends(whole.path)
        assert ledger.read(before.path)[: len(records)] == records


def test_replicates_start_from_the_parent_too(trials_in, tmp_path):
    distillation = DistillationSchedule(parent="digest", placement="2xLSLGo")
    trials = trials_in(tmp_path, config=SEEDED, distillation=distillation)
    handed = run_until(trials)
    assert {trial.record.role for trial in handed} == {"candidate", "replicate"}
    assert {each.candidate.recipe.distillation for each in handed} == {replace(distillation, hidden_state_weight=10.0)}
    resumed = trials_in(tmp_path, ledger.read(trials.path), config=SEEDED, distillation=distillation)
    assert (resumed.next_trial(), resumed.finished) == (None, True)


def test_more_seeds_can_be_asked_for_later(trials_in, tmp_path):
    run_until(trials := trials_in(tmp_path, config=CONFIG))
    assert {record.role for record in ledger.read(trials.path)} == {"candidate"}
    run_until(trials_in(tmp_path, ledger.read(trials.path), config=SEEDED))
    run_until(whole := trials_in(tmp_path / "whole", config=SEEDED))
    assert ends(trials.path) == ends(whole.path)
