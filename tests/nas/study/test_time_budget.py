import time
from contextlib import nullcontext
from dataclasses import replace

import pytest

from costmodel.errors import StoppedError
from nas.recipe.recipe import SCALES
from nas.study import time_budget
from nas.study.time_budget import Pace, TimeBudget, num_within, paced, process_start_s
from tests.nas.study.conftest import ONE_TRIAL


def test_the_budget_begins_with_the_process_not_with_the_first_trial(monkeypatch, tmp_path):
    assert 0 < time.monotonic() - process_start_s() < 86_400
    assert process_start_s() == pytest.approx(process_start_s(), abs=0.1)
    monkeypatch.setattr(time_budget, "STAT", tmp_path / "none")  # where the system does not say
    assert process_start_s() == pytest.approx(time.monotonic(), abs=5)


@pytest.mark.parametrize(
    ("left_s", "first_s", "expected"),
    [(99.0, 100.0, 0), (100.0, 100.0, 1), (187.0, 100.0, 1), (188.0, 100.0, 2), (275.0, 100.0, 3), (1e9, 100.0, 14)],
)
def test_candidates_end_one_after_another_each_with_its_share_of_evaluations(left_s, first_s, expected):
    count = num_within(
        left_s, first_s=first_s, end_s=100.0, short_s=25.0, places=2, num_trials=14, num_short=42
    )  # (100 + 3 * 25) / 2 = 87.5 s each
    assert count == expected


def test_a_training_takes_its_start_steps_and_validations_at_a_pace_that_is_told_once(monkeypatch):
    scale = replace(SCALES["smoke"], tokens=25_600, validation_tokens=3_072)  # 100 steps of 256 tokens
    pace = Pace(phases={"CUDA": 2.0, "compiler and first step": 3.0}, step_s=0.5)
    assert pace.training_s(scale) == pytest.approx(5 + 0.5 * (100 + (768 + 768 + 3_072) / 256 / 3))
    assert pace.training_s(scale, 0.25) == pytest.approx(5 + 0.5 * (25 + 768 / 256 / 3))
    clock = iter([0.0, 4.0, 4.5, 5.25, 6.0, 9.0])
    monkeypatch.setattr("nas.study.time_budget.time.monotonic", lambda: next(clock))
    told: list[Pace] = []
    after_step = paced(lambda: len(told) > 0, told.append, {"CUDA": 1.5})
    assert [after_step() for _ in range(5)] == [False, False, True, True, True]
    assert told == [Pace(phases={"CUDA": 1.5, "compiler and first step": 4.0}, step_s=0.625)]


@pytest.mark.parametrize(
    ("budget_s", "step_s", "count", "halts"), [(600.0, 0.5, 1, False), (11.0, 0.5, 0, False), (8.0, 0.5, 0, True)]
)
def test_what_a_budget_lasts_for_is_said_and_an_empty_front_is_foreseen(
    make_trials, corpus, tmp_path, caplog, budget_s, step_s, count, halts
):
    caplog.set_level("INFO", "nas")
    trials = make_trials(tmp_path, corpus, replace(ONE_TRIAL, time_budget=f"{budget_s:g}s"))
    trial = trials.next_trial()
    assert not trial.record.is_proxy
    budget = TimeBudget(budget_s, time.monotonic())
    budget.mark("Ray")
    pace = Pace(phases={"compiler and first step": 4.0}, step_s=step_s)  # 8 steps, validations like 8 more
    for _ in range(2):
        budget.foresee(trials, pace, 2, lambda key: 0.0)
    (line,) = caplog.messages
    assert f"compiler and first step 4 s); at 0.5 s a step, about {count} of 1 candidates" in line
    assert ("give at least 1min, or fewer --tokens" in line) == (count == 0)
    assert (trials.halted is not None) == halts
    if halts:
        assert trials.halted.startswith(
            "no candidate would be trained to the end within --time-budget 8s, since the first"
        )


def test_a_run_with_a_trained_candidate_is_not_halted(make_trials, corpus, tmp_path):
    trials = make_trials(tmp_path, corpus, replace(ONE_TRIAL, time_budget="1s"))
    trial = trials.next_trial()
    pace = Pace(phases={}, step_s=100.0)
    TimeBudget(None, time.monotonic()).foresee(trials, pace, 1, lambda key: 0.0)  # no budget
    trials.happened(replace(trial.ended("completed"), val_loss=2.0))
    TimeBudget(1.0, time.monotonic()).foresee(trials, pace, 1, lambda key: 0.0)
    assert trials.halted is None


@pytest.mark.parametrize(
    ("began_s", "share", "stops"), [(-6, 1.0, True), (-3, 1.0, False), (-3, 0.2, True), (-3, 0.01, False)]
)
def test_time_that_will_be_used_up_before_any_training_ends_the_run(began_s, share, stops):
    budget = TimeBudget(5.0, time.monotonic() + began_s)
    with pytest.raises(StoppedError, match="must be more than the") if stops else nullcontext():
        budget.require_left(share)  # a fifth of 15 s is done in 3 s; a hundredth is too little to tell
