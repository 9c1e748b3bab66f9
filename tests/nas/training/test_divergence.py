"""Divergence: the rule for a loss above its start, and that every kind ends a run with step, layer and reason."""

import math
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from nas.corpus.corpus import Corpus
from nas.recipe.recipe import EntropyRegularisation
from nas.training import trainer
from nas.training.batches import Validation, validate
from nas.training.divergence import WINDOW, above_start
from nas.training.objective import Objective
from nas.training.trainer import train
from tests.nas.training.short_runs import SCALE, candidate


def test_a_run_above_its_start_is_recognised_only_after_a_full_window() -> None:
    assert above_start([3.0] * WINDOW, 2.9)
    assert not above_start([3.0] * (WINDOW - 1), 2.9)


def test_a_loss_at_its_start_or_a_spike_is_no_divergence() -> None:
    assert not above_start([3.0] * WINDOW, 3.0)
    assert not above_start([2.0] * (WINDOW - 1) + [90.0], 2.9)
    assert not above_start([9.0] * (WINDOW - 1) + [2.0], 2.9)


def test_only_the_last_window_counts() -> None:
    assert above_start([0.1, *[3.0] * WINDOW], 2.9)


def poisoned(monkeypatch: pytest.MonkeyPatch, poison) -> None:
    """Calls `poison(objective)` before every step."""
    original = Objective.backward

    def backward(self, inputs, targets, **rest):
        poison(self)
        return original(self, inputs, targets, **rest)

    monkeypatch.setattr(Objective, "backward", backward)


def test_a_non_finite_loss_ends_the_run_and_names_the_layer(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus, tmp_path: Path
) -> None:
    calls = count()

    def poison(objective: Objective) -> None:
        if next(calls) == 5:
            objective.model.layers[1].attention.qkv.weight.data[0, 0] = math.nan

    poisoned(monkeypatch, poison)
    *_, outcome = train(candidate(), corpus, seed=0, folder=tmp_path)
    assert (outcome.status, outcome.steps, outcome.layer) == ("diverged", 6, "layers.1.attention.qkv")
    assert outcome.reason == "non-finite loss at step 6, first in layers.1.attention.qkv"
    assert outcome.val_loss is None
    assert list(train(candidate(), corpus, seed=0, folder=tmp_path))[-1] == outcome


def test_a_non_finite_gradient_ends_the_run_and_names_the_layer(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus
) -> None:
    def poison(objective: Objective) -> None:
        objective.model.layers[0].ffn.up.weight.register_hook(lambda gradient: gradient * math.inf)

    poisoned(monkeypatch, poison)
    *_, outcome = train(candidate(), corpus, seed=0)
    assert outcome.reason == "non-finite gradient at step 1, first in layers.0.ffn.up"


def test_a_gradient_norm_that_overflows_names_the_steepest_layer(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus
) -> None:
    def poison(objective: Objective) -> None:
        steep = objective.model.layers[1].ffn.down.weight
        steep.register_hook(lambda gradient: torch.full_like(gradient, 1e20))  # finite, but its square is not

    poisoned(monkeypatch, poison)
    *_, outcome = train(candidate(), corpus, seed=0)
    assert (outcome.status, outcome.layer) == ("diverged", "layers.1.ffn.down")
    assert outcome.reason == "gradient norm too large at step 1, steepest in layers.1.ffn.down"


def test_non_finite_thresholds_are_told_apart_from_the_model(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> None:
    def poison(objective: Objective) -> None:
        objective.penalty.thresholds.register_hook(lambda gradient: gradient * math.inf)

    poisoned(monkeypatch, poison)
    *_, outcome = train(candidate(entropy=EntropyRegularisation()), corpus, seed=0)
    assert outcome.reason == "non-finite gradient at step 1, first in penalty"


def test_good_weights_to_start_from_may_get_worse_as_long_as_they_beat_frequencies(corpus: Corpus) -> None:
    run = trainer.TrainingRun(candidate(), corpus, seed=0, folder=None, device="cpu", initial={})
    run._count(corpus.unigram_loss / 2)
    assert run.progress.initial_loss == corpus.unigram_loss
    run = trainer.TrainingRun(candidate(), corpus, seed=0, folder=None, device="cpu", initial={})
    run._count(corpus.unigram_loss + 1)
    assert run.progress.initial_loss == corpus.unigram_loss + 1


@pytest.mark.parametrize(
    ("loss", "reason", "layer"),
    [
        (710.0, "validation loss too large for a perplexity at step 4, in logits", "logits"),
        (math.nan, "non-finite validation loss at step 4, first in the model", "the model"),
        (math.inf, "non-finite validation loss at step 4, first in the model", "the model"),
    ],
)
def test_a_validation_loss_without_a_perplexity_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, corpus: Corpus, loss: float, reason: str, layer: str
) -> None:
    monkeypatch.setattr(trainer, "validate", lambda *args: Validation(loss, (torch.ones(2), torch.ones(2))))
    (outcome,) = train(candidate(), corpus, seed=0)
    assert (outcome.status, outcome.steps, outcome.reason, outcome.layer) == ("diverged", 4, reason, layer)


def test_the_largest_loss_with_a_perplexity_is_no_divergence(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> None:
    monkeypatch.setattr(trainer, "validate", lambda *args: Validation(709.0, (torch.ones(2), torch.ones(2))))
    *_, outcome = train(candidate(), corpus, seed=0)
    assert (outcome.status, outcome.perplexity) == ("completed", math.exp(709.0))


def test_a_validation_that_overflows_names_the_layer(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> None:
    original = validate

    def poisoned_validate(model, corpus, scale):
        model.layers[1].ffn.up.weight.data[0, 0] = math.nan
        return original(model, corpus, scale)

    monkeypatch.setattr(trainer, "validate", poisoned_validate)
    (outcome,) = train(candidate(), corpus, seed=0)
    assert outcome.reason == "non-finite validation loss at step 4, first in layers.1.ffn.up"


def test_a_loss_above_its_start_after_warm_up_ends_the_run(corpus: Corpus) -> None:
    hot = replace(SCALE, learning_rate=30.0, tokens=64 * 40, rungs=(1.0,))
    (outcome,) = train(candidate("SM+LN+R", hot), corpus, seed=0)
    assert outcome.status == "diverged"
    # 2 steps of warm-up and 10 more
    assert outcome.reason == f"training loss above its initial value at step 12, steepest in {outcome.layer}"
