import math
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch

from nas.recipe.recipe import EntropyRegularisation
from nas.training import trainer
from nas.training.batches import Validation, validate
from nas.training.divergence import WINDOW, above_start
from nas.training.objective import Objective
from nas.training.trainer import train
from tests.nas.training.short_runs import SCALE, before_every_step, candidate

INFINITE, LARGE = (partial(torch.full_like, fill_value=value) for value in (math.inf, 1e20))


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([3.0] * WINDOW, True),
        ([0.1, *[3.0] * WINDOW], True),  # only the last window counts
        ([3.0] * (WINDOW - 1), False),
        ([2.9] * WINDOW, False),
        ([2.0] * (WINDOW - 1) + [90.0], False),
        ([9.0] * (WINDOW - 1) + [2.0], False),
    ],
)
def test_a_run_is_above_its_start_after_a_full_window_without_spikes(losses, diverged):
    assert above_start(losses, 2.9) == diverged


def test_a_non_finite_loss_ends_the_run_and_names_the_layer(monkeypatch, corpus, tmp_path):
    calls = count()

    def poison(objective: Objective) -> None:
        if next(calls) == 5:
            objective.model.layers[1].attention.qkv.weight.data[0, 0] = math.nan

    before_every_step(monkeypatch, poison)
    *_, outcome = train(candidate(), corpus, seed=0, folder=tmp_path)
    assert (outcome.status, outcome.steps, outcome.layer) == ("diverged", 6, "layers.1.attention.qkv")
    assert outcome.reason == "non-finite loss at step 6, first in layers.1.attention.qkv"
    assert outcome.val_loss is None
    assert list(train(candidate(), corpus, seed=0, folder=tmp_path))[-1] == outcome


@pytest.mark.parametrize(
    ("parameter", "poison", "reason"),
    [
        ("model.layers.0.ffn.up.weight", INFINITE, "non-finite gradient at step 1, first in layers.0.ffn.up"),
        ("penalty.thresholds", INFINITE, "non-finite gradient at step 1, first in penalty"),
        # 1e20 is finite, but its square is not
        ("model.layers.1.ffn.down.weight", LARGE, "gradient norm too large at step 1, steepest in layers.1.ffn.down"),
    ],
)
def test_a_gradient_without_a_norm_ends_the_run_and_names_the_layer(monkeypatch, corpus, parameter, poison, reason):
    before_every_step(monkeypatch, lambda objective: objective.get_parameter(parameter).register_hook(poison))
    *_, outcome = train(candidate(entropy=EntropyRegularisation()), corpus, seed=0)
    assert (outcome.status, outcome.reason) == ("diverged", reason)
    assert outcome.layer == reason.rpartition(" ")[2]


def test_good_weights_to_start_from_may_get_worse_as_long_as_they_beat_frequencies(corpus):
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
def test_a_validation_loss_without_a_perplexity_ends_the_run(monkeypatch, corpus, loss, reason, layer):
    monkeypatch.setattr(trainer, "validate", lambda *args: Validation(loss, (torch.ones(2), torch.ones(2))))
    (outcome,) = train(candidate(), corpus, seed=0)
    assert (outcome.status, outcome.steps, outcome.reason, outcome.layer) == ("diverged", 4, reason, layer)
    monkeypatch.setattr(trainer, "validate", lambda *args: Validation(709.0, (torch.ones(2), torch.ones(2))))
    *_, outcome = train(candidate(), corpus, seed=0)  # the largest loss with a perplexity
    assert (outcome.status, outcome.perplexity) == ("completed", math.exp(709.0))


def test_a_validation_that_overflows_names_the_layer(monkeypatch, corpus):
    original = validate

    def poisoned_validate(model, corpus, scale, tokens):
        model.layers[1].ffn.up.weight.data[0, 0] = math.nan
        return original(model, corpus, scale, tokens)

    monkeypatch.setattr(trainer, "validate", poisoned_validate)
    (outcome,) = train(candidate(), corpus, seed=0)
    assert outcome.reason == "non-finite validation loss at step 4, first in layers.1.ffn.up"


def test_a_loss_above_its_start_after_warm_up_ends_the_run(corpus):
    hot = replace(SCALE, learning_rate=30.0, tokens=64 * 40, rungs=(1.0,))
    (outcome,) = train(candidate("SM+LN+R", hot), corpus, seed=0)
    assert outcome.status == "diverged"
    # 2 steps of warm-up and 10 more
    assert outcome.reason == f"training loss above its initial value at step 12, steepest in {outcome.layer}"
