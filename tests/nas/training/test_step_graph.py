from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, repeat

import pytest
import torch
from torch import Tensor

from nas.conversion.transfer import transferred
from nas.model.decoder import build
from nas.model.weights import deployed_weights
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.recipe import EntropyRegularisation, Foldable
from nas.training import readings, step_graph
from nas.training.distillation.teacher import LiveTeacher
from nas.training.trainer import train
from tests.nas.training.short_runs import SCALE, before_every_step, candidate, timeless
from tests.nas.training.test_readings import break_weight, in_turn, told

LONG = replace(SCALE, tokens=64 * 45)


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

    monkeypatch.setitem(readings.LAG, "cpu", 3)
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
    monkeypatch.setitem(readings.LAG, "cpu", 0)
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
    parent = build(candidate("SM+LN+G").trained, torch.Generator().manual_seed(7)).requires_grad_(False)
    initial = transferred(parent.architecture, deployed_weights(parent), made.initial_architecture)
    run = partial(train, made, corpus, seed=0, initial=initial, teacher=LiveTeacher(parent, lowered=False))
    events = timeless(run())
    assert captures.count("captured") == 2
    monkeypatch.setitem(step_graph.MOST_CAPTURED, "cpu", 0)
    assert timeless(run()) == pytest.approx(events)


def test_a_diverged_step_of_a_graph_is_named(monkeypatch, corpus, captures):
    made = candidate("SM(t)+ScFuFFN", replace(SCALE, tokens=64 * 400))
    acts = chain(repeat(lambda objective: None, 10), [break_weight], repeat(lambda objective: None))
    before_every_step(monkeypatch, partial(in_turn, acts))
    *_, outcome = train(made, corpus, seed=0)
    assert outcome.reason == "non-finite loss at step 11, first in layers.1.attention.qkv"
    assert "launched" in captures


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
