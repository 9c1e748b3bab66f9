import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nas.corpus.corpus import Corpus
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.recipe import EntropyRegularisation, Foldable
from nas.training import checkpoint, divergence, step_graph, trainer
from nas.training.batches import Validation, validate
from nas.training.distillation.teacher import LiveTeacher
from nas.training.divergence import WINDOW, above_start
from nas.training.objective import Objective
from nas.training.outcome import Outcome, RungRecord
from nas.training.trainer import TrainingRun, train
from tests.nas.training.short_runs import SCALE, assert_resumes, before_every_step, candidate, parent_of, timeless

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
    unigram = corpus.unigram_loss
    for first, initial in ((unigram / 2, unigram), (unigram + 1, unigram + 1)):
        run = trainer.TrainingRun(candidate(), corpus, seed=0, folder=None, device="cpu", initial={})
        run.judge(None, first, penalty=0.0, gradient_norm=1.0)
        assert run.progress.initial_loss == initial


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


LAG = 3
LONG = replace(SCALE, tokens=64 * 45)


def told(made: Candidate, corpus: Corpus, folder: Path) -> tuple[list[RungRecord | Outcome], object, object, object]:
    """Events, metrics but for seconds, diagnoses and the last weights of a training."""
    events = timeless(train(made, corpus, seed=0, folder=folder))
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row | {"seconds": ""} for row in csv.DictReader(file)]
    weights = sorted((name, value.tolist()) for name, value in checkpoint.load_latest(folder).weights.items())
    return events, rows, (folder / "diagnostics.jsonl").read_text(), weights


def test_steps_are_begun_before_earlier_ones_are_judged(monkeypatch, corpus):
    monkeypatch.setitem(divergence.LAG, "cpu", LAG)
    run = TrainingRun(
        candidate("SM+LN+G", replace(SCALE, tokens=64 * 400)), corpus, seed=0, folder=None, device="cpu", initial={}
    )
    assert [[metrics.step for metrics in run.step()] for _ in range(5)] == [[], [], [], [1], [2]]
    assert (run.begun, run.progress.step) == (5, 2)
    assert [metrics.step for metrics in run.settle()] == [3, 4, 5]


def break_weight(objective: Objective) -> None:
    objective.model.layers[1].attention.qkv.weight.data[0, 0] = math.nan


def break_gradient(objective: Objective) -> None:
    objective.get_parameter("model.layers.0.ffn.fused.weight").register_hook(INFINITE)


def at_the_eleventh(act: Callable[[Objective], None], calls: Iterator[int], objective: Objective) -> None:
    if next(calls) == 11:
        act(objective)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (break_weight, "non-finite loss at step 11, first in layers.1.attention.qkv"),
        (break_gradient, "non-finite gradient at step 11, first in layers.0.ffn.fused"),
    ],
)
def test_a_diverged_step_is_named_and_moves_no_weight(monkeypatch, corpus, tmp_path, captures, act, reason, optimizer):
    made = candidate("SM(t)+ScFuFFN", replace(SCALE, tokens=64 * 400), optimizer=optimizer)
    results = []
    for lag, most_captured in ((0, 0), (LAG, 0), (LAG, 1 << 14)):
        with monkeypatch.context() as patched:
            before_every_step(patched, partial(at_the_eleventh, act, count(1)))
            patched.setitem(divergence.LAG, "cpu", lag)
            patched.setitem(step_graph.MOST_CAPTURED, "cpu", most_captured)
            results.append(told(made, corpus, tmp_path / f"{lag} {most_captured}"))
    assert results[0][0][-1].reason == reason
    assert repr(results[0]) == repr(results[1]) == repr(results[2])  # with a NaN that equals itself
    assert "launched" in captures


def test_a_loss_above_its_start_is_found_later_too(monkeypatch, corpus, tmp_path):
    hot = candidate("SM+LN+R", replace(SCALE, learning_rate=30.0, tokens=64 * 400, rungs=(1.0,), warmup_share=0.005))
    at_once = told(hot, corpus, tmp_path / "at once")
    assert at_once[0][-1].reason.startswith("training loss above its initial value at step 12, steepest in ")
    monkeypatch.setitem(divergence.LAG, "cpu", LAG)
    assert told(hot, corpus, tmp_path / "later") == at_once


def test_a_stopped_run_resumes_to_the_same_numbers(monkeypatch, corpus, tmp_path):
    monkeypatch.setitem(divergence.LAG, "cpu", LAG)
    made = candidate("SM+LN+G", LONG, entropy=EntropyRegularisation(warmup_share=0.5))
    assert_resumes(partial(train, made, corpus, seed=0), tmp_path, stopped_after=13)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take steps of the CPU by the way of a GPU, with a graph that does the work when it is launched."""
    done: list[str] = []

    def captured(work: Callable[..., Tensor], *arguments: Tensor) -> Callable[..., Tensor]:
        done.append("captured")

        def replay(*others: Tensor) -> Tensor:
            done.append("launched")
            return work(*others)

        return replay

    monkeypatch.setitem(divergence.LAG, "cpu", 3)
    monkeypatch.setitem(step_graph.MOST_CAPTURED, "cpu", 1 << 14)
    monkeypatch.setattr(step_graph, "captured", captured)
    return done


@pytest.mark.parametrize(
    "made",
    [
        candidate("SM(t)+ScFuFFN", LONG, entropy=EntropyRegularisation(warmup_share=0.5), foldable=Foldable(every=9)),
        candidate("SM+fLN+R", replace(LONG, micro_batch=2), optimizer="muon"),
    ],
    ids=["regularised", "muon with frozen norms"],
)
def test_graphs_change_no_number(monkeypatch, corpus, tmp_path, captures, made):
    later = told(made, corpus, tmp_path / "captured")
    assert captures.count("captured") == 1
    assert captures.count("launched") > 10
    monkeypatch.setitem(step_graph.MOST_CAPTURED, "cpu", 0)
    monkeypatch.setitem(divergence.LAG, "cpu", 0)
    assert told(made, corpus, tmp_path / "at once") == later


def test_a_graph_gives_way_to_a_step_beside_it_where_memory_is_scarce(monkeypatch, corpus, tmp_path, captures):
    made = candidate("SM+LN+G", LONG)
    events = timeless(train(made, corpus, seed=0, folder=tmp_path / "beside"))
    assert captures.count("captured") == 1
    monkeypatch.setattr(step_graph, "available_bytes", lambda device: -1)
    assert timeless(train(made, corpus, seed=0, folder=tmp_path / "in turn")) == events
    assert captures.count("captured") > 1


def test_a_part_that_leaves_the_model_is_captured_anew(monkeypatch, corpus, captures):
    route = DistillationSchedule(
        parent="p", placement="2xLSLGo", prediction_weight=0.5, hidden_state_weight=1.0, end_share=0.4
    )
    made = candidate("2xooLGo", LONG, distillation=route)
    parent, initial = parent_of(made)
    run = partial(train, made, corpus, seed=0, initial=initial, teacher=LiveTeacher(parent, lowered=False))
    events = timeless(run())
    assert captures.count("captured") == 2
    monkeypatch.setitem(step_graph.MOST_CAPTURED, "cpu", 0)
    assert timeless(run()) == pytest.approx(events)


def test_where_nothing_can_be_captured_one_warning_is_given(monkeypatch, corpus, captures, caplog):
    def broken(*args: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    made = candidate("SM+LN+G", LONG)
    events = timeless(train(made, corpus, seed=0))
    monkeypatch.setattr(step_graph, "captured", broken)
    assert timeless(train(made, corpus, seed=0)) == events
    (warning,) = [record.message for record in caplog.records if record.name == step_graph.__name__]
    assert warning == (
        "steps cannot be captured as a graph, so that they take longer: "
        "operation not permitted when stream is capturing"
    )
