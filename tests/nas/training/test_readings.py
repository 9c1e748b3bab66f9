import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch

from nas.corpus.corpus import Corpus
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import EntropyRegularisation, Foldable
from nas.training import checkpoint, readings
from nas.training.objective import Objective
from nas.training.outcome import Outcome, RungRecord
from nas.training.trainer import TrainingRun, train
from tests.nas.training.short_runs import SCALE, assert_resumes, before_every_step, candidate, timeless

REGULARISED = EntropyRegularisation(warmup_share=0.5)
LAG = 3


def told(made: Candidate, corpus: Corpus, folder: Path) -> tuple[list[RungRecord | Outcome], object, object, object]:
    """Events, metrics but for seconds, diagnoses and the last weights of a training."""
    events = timeless(train(made, corpus, seed=0, folder=folder))
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row | {"seconds": ""} for row in csv.DictReader(file)]
    weights = sorted((name, value.tolist()) for name, value in checkpoint.load_latest(folder).weights.items())
    return events, rows, (folder / "diagnostics.jsonl").read_text(), weights


@pytest.mark.parametrize(
    "made",
    [
        candidate("SM(t)+ScFuFFN", entropy=REGULARISED, foldable=Foldable(every=5)),
        candidate("SM+fLN+R", replace(SCALE, micro_batch=2), optimizer="muon"),
        candidate("SM+LN+G", replace(SCALE, tokens=64 * 45)),
    ],
    ids=["regularised", "muon with frozen norms", "long"],
)
def test_numbers_that_are_read_later_are_the_same(monkeypatch, corpus, tmp_path, made):
    at_once = told(made, corpus, tmp_path / "at once")
    monkeypatch.setitem(readings.LAG, "cpu", LAG)
    assert told(made, corpus, tmp_path / "later") == at_once


def test_steps_are_begun_before_earlier_ones_are_judged(monkeypatch, corpus):
    monkeypatch.setitem(readings.LAG, "cpu", LAG)
    run = TrainingRun(
        candidate("SM+LN+G", replace(SCALE, tokens=64 * 400)), corpus, seed=0, folder=None, device="cpu", initial={}
    )
    assert [[metrics.step for metrics in run.step()] for _ in range(5)] == [[], [], [], [1], [2]]
    assert (run.begun, run.progress.step) == (5, 2)
    assert [metrics.step for metrics in run.settle()] == [3, 4, 5]


def infinite_from(objective: Objective, name: str) -> None:
    objective.get_parameter(name).register_hook(partial(torch.full_like, fill_value=math.inf))


def in_turn(acts: Iterator[Callable[[Objective], None]], objective: Objective) -> None:
    next(acts)(objective)


def break_weight(objective: Objective) -> None:
    objective.model.layers[1].attention.qkv.weight.data[0, 0] = math.nan


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (break_weight, "non-finite loss at step 11, first in layers.1.attention.qkv"),
        (
            partial(infinite_from, name="model.layers.0.ffn.fused.weight"),
            "non-finite gradient at step 11, first in layers.0.ffn.fused",
        ),
    ],
)
def test_a_diverged_step_is_named_and_moves_no_weight(
    monkeypatch, corpus, tmp_path, act: Callable[[Objective], None], reason: str, optimizer: str
):
    made = candidate("SM(t)+ScFuFFN", replace(SCALE, tokens=64 * 400), optimizer=optimizer)
    results = []
    for lag in (0, LAG):
        with monkeypatch.context() as patched:
            acts = chain(repeat(lambda objective: None, 10), [act], repeat(lambda objective: None))
            before_every_step(patched, partial(in_turn, acts))
            patched.setitem(readings.LAG, "cpu", lag)
            results.append(told(made, corpus, tmp_path / str(lag)))
    assert results[0][0][-1].reason == reason
    assert repr(results[0]) == repr(results[1])  # with a NaN that equals itself


def test_a_loss_above_its_start_is_found_later_too(monkeypatch, corpus, tmp_path):
    hot = candidate("SM+LN+R", replace(SCALE, learning_rate=30.0, tokens=64 * 400, rungs=(1.0,), warmup_share=0.005))
    at_once = told(hot, corpus, tmp_path / "at once")
    assert at_once[0][-1].reason.startswith("training loss above its initial value at step 12, steepest in ")
    monkeypatch.setitem(readings.LAG, "cpu", LAG)
    assert told(hot, corpus, tmp_path / "later") == at_once


def test_a_stopped_run_resumes_to_the_same_numbers(monkeypatch, corpus, tmp_path):
    monkeypatch.setitem(readings.LAG, "cpu", LAG)
    made = candidate("SM+LN+G", replace(SCALE, tokens=64 * 45), entropy=REGULARISED)
    assert_resumes(partial(train, made, corpus, seed=0), tmp_path, stopped_after=13)
