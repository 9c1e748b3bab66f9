"""What a diagnosis tells of a model, and when one is made."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nas.corpus.corpus import Corpus
from nas.recipe.recipe import EntropyRegularisation
from nas.training.diagnostics import NUM_DIAGNOSES, diagnose, is_due
from nas.training.objective import Objective
from nas.training.trainer import train
from tests.nas.training.short_runs import SCALE, before_every_step, candidate

TOKENS = torch.arange(4 * 16).view(4, 16)


def objective_with_gradients(name: str, entropy: EntropyRegularisation | None = None) -> Objective:
    objective = Objective(candidate(name, entropy=entropy), torch.Generator().manual_seed(0))
    objective.backward(TOKENS, TOKENS, num_parts=1, penalty_weight=0.16)
    return objective


@pytest.mark.parametrize("num_steps", [1, 7, NUM_DIAGNOSES, 30, 1000])
def test_diagnoses_are_spread_over_a_run_and_end_with_it(num_steps: int) -> None:
    scale = replace(SCALE, tokens=num_steps * 64)
    due = [step for step in range(1, num_steps + 1) if is_due(step, scale)]
    assert len(due) == min(num_steps, NUM_DIAGNOSES)
    assert due[-1] == num_steps


def test_everything_learned_is_told_with_the_models_entropies() -> None:
    objective = objective_with_gradients("SM(t)+ScFuFFN", EntropyRegularisation())
    diagnosis = diagnose(objective, TOKENS, step=3)
    means = [layer.mean(dim=(0, 2)) for layer in objective.model(TOKENS).entropies]
    torch.testing.assert_close(torch.tensor(diagnosis.head_entropies), torch.stack(means))
    assert diagnosis.quarter_shares is not None
    assert sum(diagnosis.quarter_shares) == pytest.approx(1)
    assert diagnosis.num_nan == [0, 0]
    assert diagnosis.thresholds is not None
    assert [pytest.approx(row) for row in diagnosis.thresholds] == [[0.36] * 2] * 2
    assert diagnosis.temperatures == {f"layers.{index}": [pytest.approx(0.1)] * 2 for index in range(2)}
    assert diagnosis.scalars == {
        f"layers.{index}.ffn.residual.{name}": [1.0] for index in range(2) for name in ("alpha", "beta")
    }


def test_a_diagnosis_makes_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = objective_with_gradients("SM+LN+G")
    monkeypatch.setattr(objective.model, "logits", None)  # would raise
    assert len(diagnose(objective, TOKENS, step=3).head_entropies) == 2


def test_slopes_are_told_and_a_model_without_extras_has_none() -> None:
    assert diagnose(objective_with_gradients("2xoSoKo"), TOKENS, step=1).scalars == {
        f"layers.{index}.ffn.activation.slope": [pytest.approx(0.01)] for index in range(2)
    }
    plain = diagnose(objective_with_gradients("SM+LN+G"), TOKENS, step=1)
    assert (plain.thresholds, plain.temperatures, plain.scalars) == (None, {}, {})


def test_gradient_norms_add_up_to_the_whole() -> None:
    objective = objective_with_gradients("SM+LN+G", EntropyRegularisation())
    norms = diagnose(objective, TOKENS, step=1).gradient_norms
    assert {"embed", "position", "layers.0", "layers.1", "penalty"} <= set(norms)
    whole = math.hypot(*(float(p.grad.norm()) for p in objective.parameters() if p.grad is not None))
    assert math.hypot(*(norm or 0.0 for norm in norms.values())) == pytest.approx(whole, rel=1e-5)


def test_nans_are_counted_by_layer_and_written_as_null() -> None:
    objective = objective_with_gradients("SM+LN+G")
    objective.model.layers[1].attention.qkv.weight.data[0, 0] = math.nan
    gradient = objective.model.embed.weight.grad
    assert gradient is not None
    gradient[0, 0] = math.inf
    diagnosis = diagnose(objective, TOKENS, step=1)
    assert diagnosis.num_nan == [0, 4 * 16]  # head 0 of layer 1, all 4 x 16 rows
    assert diagnosis.head_entropies[1][0] is None
    assert diagnosis.gradient_norms["embed"] is None
    assert (diagnosis.quarter_shares, diagnosis.flags) == (None, ())


def diagnoses(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]


def test_a_run_writes_its_diagnoses_and_they_change_nothing(corpus: Corpus, tmp_path: Path) -> None:
    made = candidate("SM(t)+ScFuFFN", entropy=EntropyRegularisation())
    *_, kept = train(made, corpus, seed=0, folder=tmp_path)
    *_, unkept = train(made, corpus, seed=0)
    assert kept.val_loss == unkept.val_loss
    assert [diagnosis["step"] for diagnosis in diagnoses(tmp_path)] == list(range(1, 17))


def test_the_step_that_diverged_is_looked_into(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = "model.layers.1.attention.qkv.weight"
    before_every_step(monkeypatch, lambda objective: objective.get_parameter(weight).data[0, 0].fill_(math.nan))
    *_, outcome = train(candidate("SM+LN+G"), corpus, seed=0, folder=tmp_path)
    assert outcome.status == "diverged"
    assert [(diagnosis["step"], diagnosis["num_nan"]) for diagnosis in diagnoses(tmp_path)] == [(1, [0, 64])]


def test_the_weight_of_the_penalty_follows_its_schedule(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    original, weights = Objective.backward, []

    def backward(self, inputs, targets, *, penalty_weight, **rest):
        weights.append(penalty_weight)
        return original(self, inputs, targets, penalty_weight=penalty_weight, **rest)

    monkeypatch.setattr(Objective, "backward", backward)
    list(train(candidate("SM", entropy=EntropyRegularisation(weight=0.4, warmup_share=0.25)), corpus, seed=0))
    assert weights == pytest.approx([0.1, 0.2, 0.3, *[0.4] * 13])
