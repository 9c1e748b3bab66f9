import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from costmodel.errors import StoppedError
from nas.recipe.recipe import SCALES
from nas.searchers.strategy import Suggestion
from nas.study import time_budget
from nas.study.schedule import Trainings
from nas.study.time_budget import Needs, Pace, TimeBudget, fitting, num_equivalent_steps, paced, process_start_s
from tests.nas.study.conftest import ONE_TRIAL


def test_the_budget_begins_with_the_process_not_with_the_first_trial(monkeypatch, tmp_path):
    assert 0 < time.monotonic() - process_start_s() < 86_400
    assert process_start_s() == pytest.approx(process_start_s(), abs=0.1)
    monkeypatch.setattr(time_budget, "STAT", tmp_path / "none")  # where the system does not say
    assert process_start_s() == pytest.approx(time.monotonic(), abs=5)


NEEDS = Needs(end_s=100.0, short_s=25.0)


@pytest.mark.parametrize(
    ("left_s", "busy_s", "ended", "evaluated", "expected"),
    [
        (1e9, 0.0, 0, 0, (14, 42)),  # all that are planned
        (850.0, 0.0, 0, 0, (11, 33)),  # 11 * (75 + 3 * 25) = 1,650 of 2 * 850 s
        (525.0, 0.0, 0, 0, (7, 21)),  # 7 * 75 + 21 * 25 = 1,050
        (450.0, 0.0, 0, 0, (6, 6)),  # 1.5 * (6 * 75 + 6 * 25) = 900
        (350.0, 0.0, 0, 0, (6, 0)),  # evaluations are given up first: 6 * 100 of 700
        (450.0, 600.0, 4, 0, (2, 2)),  # those that end besides count: 1.5 * (2 * 75 + 2 * 25) = 2 * 450 - 600
        (200.0, 0.0, 0, 0, (4, 0)),
        (75.0, 0.0, 0, 2, (2, 0)),  # evaluated candidates continue
        (99.0, 0.0, 0, 0, (0, 0)),
        (-5.0, 0.0, 0, 0, (0, 0)),
    ],
)
def test_evaluations_keep_their_share_until_few_candidates_would_end(left_s, busy_s, ended, evaluated, expected):
    given = {"places": 2, "needs": NEEDS, "most": Trainings(14, 42), "num_ended": ended, "num_evaluated": evaluated}
    assert fitting(left_s, busy_s, **given) == expected


def test_a_promoted_candidate_starts_once_more():
    fits = partial(fitting, 1200.0, 0.0, places=1, most=Trainings(8, 24), num_ended=6, num_evaluated=0)
    assert fits(needs=NEEDS) == (8, 24)  # 8 * 75 + 24 * 25
    assert fits(needs=NEEDS._replace(start_s=5.0)) == (7, 21)  # 7 * 80 + 21 * 25


def test_only_a_promoted_candidate_continues_its_evaluation(feasible):
    final = Suggestion(next(feasible.members()), index=3)
    again = replace(final, role="replicate", replicate=1)
    trainings = (final, replace(final, is_proxy=True), again, replace(final, index=4))
    assert [NEEDS.of(training, {3}) for training in trainings] == [75, 25, 100, 100]


def test_a_pace_is_told_after_a_second_and_then_every_ten(monkeypatch):
    scale = replace(SCALES["smoke"], tokens=25_600, validation_tokens=3_072)  # 100 steps of 256 tokens
    assert num_equivalent_steps(scale) == pytest.approx(100 + (768 + 768 + 3_072) / 256 / 3)
    assert num_equivalent_steps(scale, 0.25) == pytest.approx(25 + 768 / 256 / 3)
    clock = iter([0.0, 4.0, 4.5, 5.25, 6.0, 15.0, 15.5, 20.0])
    monkeypatch.setattr("nas.study.time_budget.time.monotonic", lambda: next(clock))
    told: list[Pace] = []
    after_step = paced(lambda: len(told) > 1, told.append, {"CUDA": 1.5})
    assert [after_step() for _ in range(7)] == [False, False, False, False, False, True, True]
    phases = {"CUDA": 1.5, "compiler and first step": 4.0}
    assert told == [Pace(phases=phases, num_steps=2, seconds=1.25), Pace(phases=phases, num_steps=3, seconds=10.25)]


def test_the_pace_is_that_of_the_last_minute(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("nas.study.time_budget.time.monotonic", lambda: now_s)
    budget = TimeBudget(600.0, 0.0)
    assert budget.step_s is None
    budget.expect(9.0)
    assert budget.step_s == 9.0
    for now_s, num_steps in ((5.0, 1), (15.0, 10), (70.0, 5)):  # noqa: B007
        budget.told((0, 0), Pace(phases={}, num_steps=num_steps, seconds=10.0))
    assert budget.step_s == 20.0 / 15


def told(budget, trial, step_s):
    budget.told(trial.key, Pace(phases={"compiler and first step": 4.0}, num_steps=2, seconds=2 * step_s))


@pytest.fixture
def study(make_trials, corpus, tmp_path):
    """Makes trials of 8 steps, whose validations take like 8 more, one of them in training."""

    def make(step_s=0.5, **changes):
        trials = make_trials(tmp_path, corpus, replace(ONE_TRIAL, **changes))
        seconds, limit_s = trials.setting.config.time_budget_s, trials.setting.config.time_limit_s
        budget = TimeBudget(seconds, time.monotonic(), limit_s)
        budget.mark("Ray")
        trials.has_time_for = partial(budget.has_time_for, trials)
        budget.expect(step_s)
        budget.plan(trials, 1)
        first = trials.next_trial()
        told(budget, first, step_s)
        budget.plan(trials, 1)
        return budget, trials, first

    return make


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (600, "(compiler and first step 4 s); at 0.5 s a step, about 3 of 3 candidates will be trained"),
        (30, "at 0.5 s a step, about 2 of 3 candidates will be trained to the end in it"),
        (5, "at 0.5 s a step, no candidate ends in it; the first one does about"),
    ],
)
def test_a_budget_is_met_by_fewer_trainings_and_a_late_first_candidate_is_foreseen(study, caplog, seconds, line):
    caplog.set_level("INFO", "nas")
    budget, trials, first = study(time_budget=f"{seconds}s", num_trials=3)
    assert caplog.messages[0].startswith("time budget ")
    assert line in caplog.messages[0]
    assert trials.halted is None
    count = 0
    while trials.next_trial() is not None:
        count += 1
        budget.plan(trials, 1)
    assert 1 + count == {600: 3, 30: 2, 5: 1}[seconds]
    assert trials.is_held == (seconds != 600)
    assert not budget.is_over(trials)
    budget._began_s -= 600  # beyond the budget, but the first candidate has not ended
    assert not budget.is_over(trials)
    trials.happened(replace(first.ended("failed"), status="completed", val_loss=2.0))
    assert budget.is_over(trials)


def test_after_the_budget_a_diverged_candidate_ends_the_run_unless_another_is_in_training(study):
    budget, trials, first = study(time_budget="40s", num_trials=2)
    second = trials.next_trial()
    budget._began_s -= 600
    trials.happened(first.ended("diverged", "loss"))
    assert not budget.is_over(trials)
    trials.happened(second.ended("diverged", "loss"))
    assert budget.is_over(trials)


def test_a_limit_ends_a_run_that_would_train_nothing(study):
    budget, trials, _ = study(time_limit="8s")
    assert trials.halted.startswith("no candidate would be trained to the end within --time-limit 8 s, since the first")
    assert trials.halted.endswith("give at least 1min, or fewer --tokens")
    budget, trials, _ = study(time_limit="60s", time_budget="8s")
    assert trials.halted is None
    budget._began_s -= 60
    assert budget.is_over(trials)


def test_without_a_budget_nothing_is_planned(study, caplog):
    caplog.set_level("INFO", "nas")
    budget, trials, _ = study(step_s=1e6, num_trials=2)
    assert (caplog.messages, trials.halted, budget.is_over(trials)) == ([], None, False)
    assert trials.next_trial() is not None


def test_what_is_skipped_for_want_of_time_is_trained_by_a_resumed_run(study, make_trials, corpus, tmp_path):
    _, trials, first = study(time_budget="13s", num_trials=3)
    assert trials.next_trial() is None
    trials.happened(replace(first.ended("failed"), status="completed", val_loss=2.0))
    again = make_trials(tmp_path, corpus, trials.setting.config, records=trials.records)
    trials = [again.next_trial() for _ in range(2)]
    assert None not in trials
    assert first.key not in {trial.key for trial in trials}


@pytest.mark.parametrize(
    ("began_s", "share", "late"), [(-6, 1.0, True), (-3, 1.0, False), (-3, 0.2, True), (-3, 0.01, False)]
)
def test_time_that_is_used_up_before_any_training_is_said_and_ends_a_limited_run(caplog, began_s, share, late):
    caplog.set_level("INFO", "nas")
    budget = TimeBudget(5.0, time.monotonic() + began_s)
    for _ in range(2):
        budget.prepare(share)  # a fifth of 15 s is done in 3 s; a hundredth is too little to tell
    assert ["before any training, more than --time-budget 5 s" in line for line in caplog.messages] == [True] * late
    with pytest.raises(StoppedError, match="--time-limit 5 s must be more than the") if late else nullcontext():
        TimeBudget(None, time.monotonic() + began_s, 5.0).prepare(share)
