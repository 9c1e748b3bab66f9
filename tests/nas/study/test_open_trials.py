"""What a resolved study says reaches its trials, their schedule and their searcher."""

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from costmodel.cost import Budget
from nas.provenance import versions
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import DistillationSchedule
from nas.run.config import StudyConfig, study_recipe
from nas.run.folder import ParentResult
from nas.searchers.strategy import Suggestion
from nas.study import open_trials as module
from nas.study.open_trials import affordable, open_trials, proposals_of, search_problem
from nas.study.throughput import training_rate
from nas.study.time_budget import TimeBudget
from search_spaces.bases import BASES
from search_spaces.budget.feasible import FeasibleSpace, within_budget
from search_spaces.budget.priced_space import price_of, price_space
from search_spaces.notation import parse, placement
from search_spaces.space import load_space
from tests.conftest import ToyPricer

CONFIG = StudyConfig(
    budget_latency="60s", space="ladder", scale="smoke", searcher="stratified", seed=4, num_trials=7, finalist_seeds=3,
    generation_size=3, gpus_per_trial=0.5,
)  # fmt: skip
FROM_PARENT = DistillationSchedule(parent="p", placement="12xLSLGo")
PARENT = ParentResult(name="made", notation="SM+LN+G", val_loss=2.5, latency_s=30.0)


@pytest.fixture(scope="module")
def ladder() -> FeasibleSpace:
    return within_budget(price_space(load_space("ladder"), ToyPricer(), 16), Budget(latency_s=150.0))


@pytest.fixture
def study(ladder, make_meta, tmp_path):
    def make(distillation: DistillationSchedule | None = FROM_PARENT, config: StudyConfig = CONFIG) -> Any:
        meta = make_meta(recipe=study_recipe(config, distillation), parent=PARENT, reference=(60.0, 6.0))
        corpora = {"corpus": "first", "second": "second"}
        return SimpleNamespace(config=config, feasible=ladder, meta=meta, folder=tmp_path, **corpora)

    return make


def test_every_setting_reaches_the_trials_and_the_schedule(study, tmp_path: Path) -> None:
    given = study()
    trials = open_trials(given)
    setting: Any = trials.setting
    schedule = trials.schedule
    assert (setting.config, setting.recipe, setting.folder) == (CONFIG, given.meta.recipe, tmp_path)
    assert (setting.corpus, setting.second, setting.versions) == ("first", "second", versions())
    devices = [open_trials(study(config=replace(CONFIG, gpus_per_trial=share))).setting.device for share in (0.0, 1.0)]
    assert (setting.device, *devices) == ("cuda", "cpu", "cuda")
    assert (schedule.seed, schedule.most.ends, schedule.generation_size) == (4, 7, 3)
    assert (schedule.finalist_seeds, schedule.most_replicates) == (3, 4)
    assert (schedule.reference, schedule.parent_loss) == ((60.0, 6.0), 2.5)


def test_baselines_are_published_rows_over_the_budget_but_for_the_parent(study, ladder) -> None:
    relu = price_of(ladder.priced, parse("12xLSLRo", ladder.space.base))
    wide = within_budget(ladder.priced, Budget(latency_s=relu.latency_s))
    for distillation, feasible, expected in (
        (None, ladder, ["12xLSLGo", "12xLSLRo"]),
        (FROM_PARENT, ladder, ["12xLSLRo"]),
        (None, wide, ["12xLSLGo"]),
    ):
        (given := study(distillation)).feasible = feasible
        proposals = open_trials(given).schedule.proposals
        assert {proposal.role for proposal in proposals} == {"baseline"}
        assert sorted(placement(proposal.member.architecture) for proposal in proposals) == expected


def test_proposals_are_read_back_from_the_ledger(ladder, make_record) -> None:
    member = replace(parse("12xLSLRo", ladder.space.base), entropy_regularised=True)
    facts = {"placement": "12xLSLRo", "entropy_regularised": True, "is_proxy": True, "expected_loss": 2.25}
    proposed = make_record(3, event="proposed", status="proposed", generation=1, role="baseline", **facts)
    read = Suggestion(member, is_proxy=True, expected=2.25, index=3, generation=1, role="baseline")
    assert proposals_of([make_record(3), proposed], ladder.space.base) == [read]


def test_a_searcher_knows_the_parent_and_the_loss_to_beat(study, ngrams) -> None:
    alone, taught = study(None), study()
    trigram = replace(taught.meta, ngrams=ngrams)
    scratch = replace(alone.meta, parent=None)
    at_own_size: Any = SimpleNamespace(scale="parent", short_finetune=True)
    for config, meta, loss, parent_loss in (
        (CONFIG, scratch, 6.0, None),
        (CONFIG, trigram, ngrams.losses[2], 2.5),
        (at_own_size, trigram, 2.5 + math.log(1.5), 2.5),
    ):
        problem = search_problem(config, taught.feasible, meta)
        assert problem.reference_loss == pytest.approx(loss)
        assert problem.parent_loss == parent_loss
        assert problem.short_finetune == (config is at_own_size)
        assert (problem.parent and placement(problem.parent)) == (None if meta is scratch else "12xLSLGo")


def budgeted(make_meta: Any, *, seconds: float | None, places: int = 2, **changes: Any) -> tuple[Any, TimeBudget]:
    """Of 131,072 tokens in 128 steps, from scratch."""
    config = StudyConfig(budget_latency="5min", scale="smoke", **changes)
    recipe = study_recipe(replace(config, tokens=131_072), None)
    resources = SimpleNamespace(at_a_time=places, threads_per_trial=1, gpus_per_trial=0.0, ray_address=None)
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

    def rate(candidate: Candidate, device: str, *, num_threads: int, num_beside: int, window_s: float) -> float:
        assert (num_threads, num_beside) == (1, changes.get("places", 2) - 1)
        asked.append(window_s)
        return rates[len(asked) - 1]

    resolved, budget = budgeted(make_meta, seconds=seconds, **changes)
    patches = {"training_rate": rate, "STARTING_S": 0.0, "MARGIN": 1.0}
    patches |= {"new_meta": lambda *_: make_meta(vocab_size=7), "num_equivalent_steps": lambda scale: scale.num_steps}
    for name, value in patches.items():
        monkeypatch.setattr(module, name, value)
    meta = affordable(resolved, budget)
    assert asked == windows
    assert meta.recipe.scale.tokens == pytest.approx(tokens, rel=0.01)
    is_cut = tokens != 131_072
    assert meta.planned_tokens == (131_072 if is_cut else None)
    assert (meta.vocab_size == 7) == is_cut  # baselines from scratch are counted again
    assert ["--tokens 131072 keeps them" in line for line in caplog.messages] == [True] * is_cut
    assert budget.step_s == (1_024 / rates[-1] if rates else None)
    if is_cut:  # a session that ended before its first trial is not cut again
        asked.clear()
        resolved.meta = meta
        assert affordable(resolved, budget) == meta


def test_a_rate_is_measured_beside_processes_that_keep_cores_busy():
    recipe = study_recipe(StudyConfig(budget_latency="5min", scale="smoke"), None)
    candidate = Candidate(architecture=BASES["tiny"], recipe=recipe)
    assert training_rate(candidate, "cpu", num_beside=2, window_s=0.05) > 0
