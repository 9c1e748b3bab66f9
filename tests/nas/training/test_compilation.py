from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from nas.model import cross_entropy
from nas.recipe.candidate import Candidate, candidate_id
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.recipe import EntropyRegularisation, Freezing, Recipe
from nas.training import device
from nas.training.distillation.teacher import CachedTeacher
from nas.training.trainer import train
from tests.nas.training.short_runs import SCALE, candidate, parent_of

pytestmark = [  # torch's own: of every stream, and under Python 3.13.0
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python"),
]
REGULARISED = EntropyRegularisation()


@pytest.fixture(autouse=True)
def _compiled_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(device.BACKENDS, "cpu", "aot_eager")
    torch._dynamo.reset()
    device._compiled.cache_clear()
    counters.clear()
    yield
    torch._dynamo.reset()
    device._compiled.cache_clear()


def num_graphs() -> int:
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    ("made", "num_kinds"),
    [
        (candidate("SM+fLN+R", entropy=REGULARISED, freezing=Freezing(start_share=0.2, end_share=0.7)), 1),
        (candidate("SM(t)+ScFuFFN", replace(SCALE, micro_batch=1), entropy=REGULARISED), 1),
        (candidate("1xlHmXo-1xLSLGo-m"), 2),
    ],
    ids=["frozen norms", "four parts", "two kinds"],
)
def test_a_training_compiles_each_kind_of_layer_once(corpus, caplog, made: Candidate, num_kinds: int):
    eager = list(train(replace(made, recipe=replace(made.recipe, compile="off")), corpus, seed=0))
    assert num_graphs() == 0
    for _ in range(2):  # of the second training none are its own
        compiled = list(train(made, corpus, seed=0))
        assert num_graphs() == num_kinds
    assert compiled[-1].val_loss == pytest.approx(eager[-1].val_loss, rel=2e-4)
    assert warned(caplog) == []


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == device.__name__]


def test_gates_move_without_compiling_and_a_removed_part_leaves_another_kind(corpus, caplog):
    route = DistillationSchedule(parent="p", placement="2xLSLGo", prediction_weight=0.5, end_share=0.6)
    made = candidate("2xooLGo", distillation=route, entropy=REGULARISED)
    parent, initial = parent_of(made)
    run = partial(train, corpus=corpus, seed=0, initial=initial, teacher=CachedTeacher(parent, 16))
    eager = list(run(replace(made, recipe=replace(made.recipe, compile="off"))))
    graphs: list[int] = []

    def counted() -> bool:
        graphs.append(num_graphs())
        return False

    list(run(made, stop=counted))
    assert graphs == [1] * 10 + [2] * 6  # the gate is 0 after step 10
    compiled = list(run(made))
    assert compiled[-1].val_loss == pytest.approx(eager[-1].val_loss, rel=2e-4)
    assert warned(caplog) == []


def test_where_nothing_can_be_compiled_one_warning_is_given(monkeypatch, corpus, caplog):
    def broken(*args: object) -> None:
        raise RuntimeError("no compiler")

    made = candidate("SM+LN+G")
    eager = list(train(replace(made, recipe=replace(made.recipe, compile="off")), corpus, seed=0))
    monkeypatch.setitem(device.BACKENDS, "cpu", broken)
    assert [event.val_loss for event in train(made, corpus, seed=0)] == [event.val_loss for event in eager]
    (warning,) = warned(caplog)
    assert warning.startswith("layers cannot be compiled, so that steps take longer: ")
    assert "no compiler" in warning


@pytest.mark.parametrize("cap", [None, 3.0])
def test_compiled_losses_have_the_numbers_and_gradients_of_others(monkeypatch, cap):
    monkeypatch.setitem(cross_entropy.CHUNK_SIZE, "cpu", 1)  # 128 rows a chunk
    run = device.compiled(cross_entropy.losses_of_chunk, Recipe(), "cpu")
    generator = torch.Generator().manual_seed(0)
    hidden, theirs = torch.randn(2, 256, 8, generator=generator)
    weight, targets = torch.randn(30, 8, generator=generator), torch.randint(30, (256,), generator=generator)

    def parent_logits(rows: slice) -> torch.Tensor:
        return theirs[rows] @ weight.detach().T

    def alone(hidden: torch.Tensor, weight: torch.Tensor, run: cross_entropy.Runner) -> torch.Tensor:
        return cross_entropy.projected_cross_entropy(hidden, weight, targets, cap, run)

    def taught(hidden: torch.Tensor, weight: torch.Tensor, run: cross_entropy.Runner) -> torch.Tensor:
        return cross_entropy.fully_distilled(hidden, weight, targets, parent_logits, 0.3, cap, run).loss

    for loss in (alone, taught):
        results = []
        for runner in (cross_entropy.losses_of_chunk, run):
            parts = [part.clone().requires_grad_() for part in (hidden, weight)]
            value = loss(parts[0], parts[1], runner)
            results.append([value.detach(), *torch.autograd.grad(value, parts)])
        torch.testing.assert_close(*results)
    assert num_graphs() == 2


def test_only_what_is_asked_for_names_a_candidate():
    made = candidate("SM+LN+G")
    assert candidate_id(made) == candidate_id(replace(made, recipe=replace(made.recipe, compile="auto")))
    assert candidate_id(made) != candidate_id(replace(made, recipe=replace(made.recipe, compile="off")))
