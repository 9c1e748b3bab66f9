import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nas.recipe.candidate import Candidate
from nas.run.config import StudyConfig, study_recipe
from nas.study import open_trials
from nas.study.throughput import training_rate
from nas.study.time_budget import TimeBudget
from search_spaces.bases import BASES


def study(make_meta: Any, *, seconds: float | None, places: int = 2, **changes: Any) -> tuple[Any, TimeBudget]:
    """Of 131,072 tokens in 128 steps, from scratch."""
    config = StudyConfig(budget_latency="5min", scale="smoke", **changes)
    recipe = study_recipe(replace(config, tokens=131_072), None)
    resources = SimpleNamespace(at_a_time=places, gpus_per_trial=0.0, ray_address=None)
    meta = make_meta(recipe=recipe, base=BASES["tiny"])
    given = {"feasible": None, "corpus": None, "second": None, "parent": None}
    study = SimpleNamespace(config=config, meta=meta, resources=resources, **given)
    return study, TimeBudget(seconds, time.monotonic())


@pytest.mark.parametrize(
    ("seconds", "rates", "changes", "tokens", "windows"),
    [
        (None, [], {}, 131_072, []),  # no budget, no measurement
        (600.0, [8_192.0], {}, 131_072, [2.0]),
        (600.0, [128.0, 8_192.0], {}, 131_072, [2.0, 20.0]),  # busy for a moment
        (600.0, [218.5, 218.5], {}, 131_072 // 2, [2.0, 20.0]),  # two in a row would take 2 * 131,072 / 218.5 = 1,200 s
        (600.0, [64.0, 64.0], {}, 131_072 // 4, [2.0, 20.0]),
        (600.0, [64.0], {"tokens": 131_072}, 131_072, [2.0]),  # the user's own stay
        (600.0, [437.0, 437.0], {"places": 1}, 131_072 * 2 // 3, [2.0, 20.0]),  # three in a row 900 s
    ],
)
def test_tokens_are_cut_before_the_first_candidate_if_three_would_not_end(
    make_meta, monkeypatch, caplog, seconds, rates, changes, tokens, windows
):
    caplog.set_level("INFO", "nas")
    asked: list[float] = []

    def rate(candidate: Candidate, device: str, *, num_beside: int, window_s: float) -> float:
        assert num_beside == changes.get("places", 2) - 1
        asked.append(window_s)
        return rates[len(asked) - 1]

    resolved, budget = study(make_meta, seconds=seconds, **changes)
    patches = {"training_rate": rate, "STARTING_S": 0.0, "MARGIN": 1.0}
    patches |= {"new_meta": lambda *_: make_meta(vocab_size=7), "num_equivalent_steps": lambda scale: scale.num_steps}
    for name, value in patches.items():
        monkeypatch.setattr(open_trials, name, value)
    meta = open_trials.affordable(resolved, budget)
    assert asked == windows
    assert meta.recipe.scale.tokens == pytest.approx(tokens, rel=0.01)
    is_cut = tokens != 131_072
    assert meta.planned_tokens == (131_072 if is_cut else None)
    assert (meta.vocab_size == 7) == is_cut  # baselines from scratch are counted again
    assert ["--tokens 131072 keeps them" in line for line in caplog.messages] == [True] * is_cut
    assert budget.step_s == (1_024 / rates[-1] if rates else None)


def test_a_rate_is_measured_beside_processes_that_keep_cores_busy():
    recipe = study_recipe(StudyConfig(budget_latency="5min", scale="smoke"), None)
    candidate = Candidate(architecture=BASES["tiny"], recipe=recipe)
    assert training_rate(candidate, "cpu", num_beside=2, window_s=0.05) > 0
