from dataclasses import replace

import pytest
import torch

from nas.model.norms import freezing_steps, frozen_norms
from nas.model.weights import load_stored
from nas.recipe.candidate import Candidate, candidate_id
from nas.recipe.recipe import Freezing
from nas.training import checkpoint
from nas.training.objective import Objective
from nas.training.trainer import TrainingRun, train
from tests.nas.training import short_runs
from tests.nas.training.short_runs import SCALE

NAMES = ["layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2", "final_norm"]


def candidate(name: str = "SM+fLN+R", tokens: int = SCALE.tokens, **recipe) -> Candidate:
    return short_runs.candidate(name, replace(SCALE, tokens=tokens), **recipe)


def test_norms_are_frozen_one_after_another():
    steps = freezing_steps(NAMES, Freezing(start_share=0.4, end_share=0.8), 100)
    order = ("layers.0.norm1", "layers.1.norm1", "layers.0.norm2", "layers.1.norm2", "final_norm")
    assert steps == dict(zip(order, (40, 50, 60, 70, 80), strict=True))
    assert freezing_steps(["final_norm"], Freezing(), 100) == {"final_norm": 40}  # one alone


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_all_are_frozen_within_however_few_steps(num_steps):
    for settings in (Freezing(), Freezing(start_share=0.0, end_share=0.0), Freezing(start_share=1.0, end_share=1.0)):
        assert all(1 <= step <= num_steps for step in freezing_steps(NAMES, settings, num_steps).values())


def test_the_span_names_a_candidate_where_there_are_norms_to_freeze_and_must_be_possible():
    for start, end in ((0.5, 0.4), (-0.1, 0.4), (0.5, 1.1), (float("nan"), 0.5)):
        with pytest.raises(ValueError, match="freezing needs 0 <= `start_share` <= `end_share` <= 1"):
            Freezing(start_share=start, end_share=end)
    other = Freezing(end_share=0.9)
    assert candidate_id(candidate("SM+LN+R", freezing=other)) == candidate_id(candidate("SM+LN+R"))
    assert candidate_id(candidate(freezing=other)) != candidate_id(candidate())


def test_a_run_freezes_by_the_number_of_the_step(corpus):
    run = TrainingRun(candidate(), corpus, seed=0, folder=None, device="cpu", initial={})
    norms = frozen_norms(run.objective.model)
    due = freezing_steps(list(norms), Freezing(), 16)
    for step in range(1, 17):
        run.step()
        assert {name for name, norm in norms.items() if norm.is_frozen} == {
            name for name, turn in due.items() if turn <= step
        }
    assert all(norm.is_frozen for norm in norms.values())


@pytest.mark.parametrize("name", ["SM+fLN+R", "SM+fRMS+G", "1xlSMRo-1xooLRo-m"])
@pytest.mark.parametrize("num_steps", [1, 2, 16])
def test_a_completed_run_has_every_such_norm_frozen(corpus, tmp_path, name, num_steps):
    made = candidate(name, tokens=num_steps * 64)
    *_, outcome = train(made, corpus, seed=0, folder=tmp_path)
    assert outcome.status == "completed"
    model = Objective(made, torch.Generator()).model
    load_stored(model, checkpoint.load_latest(tmp_path).weights)
    assert frozen_norms(model)
    assert all(norm.is_frozen and norm.sigma > 0 for norm in frozen_norms(model).values())


def test_weights_that_were_frozen_stay_so_from_the_first_step(corpus):
    made = candidate()
    names = frozen_norms(Objective(made, torch.Generator()).model)
    gains = {f"{name}.weight": torch.full((made.trained.d_model,), 2.0) for name in names}
    run = TrainingRun(made, corpus, seed=0, folder=None, device="cpu", initial=gains)
    run.step()
    assert all(norm.is_frozen and norm.deviation == 1 for norm in frozen_norms(run.objective.model).values())
