"""Memory of a training: counted by hand, and on a model that is there."""

from dataclasses import replace

import pytest
import torch

from costmodel.errors import UserError
from nas.recipe.distillation import DistillationSchedule
from nas.training.memory import Memory, available_bytes, require_memory, training_memory
from nas.training.objective import Objective
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.notation import placement
from tests.nas.training.short_runs import SCALE, candidate

ROUTE = DistillationSchedule(parent="p", placement=placement(candidate().trained))


def test_moments_are_two_numbers_a_parameter_of_adamw() -> None:
    memory = training_memory(candidate())
    size = sum(4 * value.numel() for value in Objective(candidate(), torch.Generator()).model.parameters())
    assert (memory.parameters, memory.gradients, memory.moments, memory.parent) == (size, size, 2 * size, 0)
    assert memory.total == 4 * size + memory.activations


def test_activations_are_what_a_micro_batch_keeps_for_its_gradients() -> None:
    made = candidate()
    objective = Objective(made, torch.Generator().manual_seed(0))
    parameter_addresses = {value.data_ptr() for value in objective.parameters()}
    kept = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value
        return value

    tokens = torch.zeros(SCALE.micro_batch, SCALE.seq_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        result = objective(tokens, tokens)
    expected = sum(
        value.untyped_storage().nbytes() for place, value in kept.items() if place not in parameter_addresses
    )
    del result
    assert training_memory(made).activations == pytest.approx(expected, rel=0.02)  # another kernel of attention
    doubled = candidate(scale=replace(SCALE, batch=8, micro_batch=8))
    assert training_memory(doubled).activations > 1.9 * training_memory(made).activations


def test_layers_computed_again_keep_what_they_read() -> None:
    usual, again = (training_memory(candidate(recompute=recompute)) for recompute in (False, True))
    assert again.activations < 0.6 * usual.activations
    assert replace(again, activations=0) == replace(usual, activations=0)


def test_a_model_that_is_counted_leaves_nothing_in_one_that_is_there() -> None:
    made = replace(candidate(), architecture=base_architecture("pythia-70m", Dimensions(layers=1, heads=2, d_model=24)))
    training_memory(made)
    logits, _ = Objective(made, torch.Generator()).model(torch.zeros(1, 4, dtype=torch.int64))
    assert logits.isfinite().all()


def test_what_is_not_trained_has_no_moments() -> None:
    whole = training_memory(candidate("1xLSLGo-1xLSLRo", route=ROUTE))
    part = training_memory(candidate("1xLSLGo-1xLSLRo", route=replace(ROUTE, trainable="changed")))
    assert whole.parent == whole.parameters == part.parameters
    width = candidate().trained.d_model
    changed = 4 * (8 * width**2 + (4 + 1 + 2) * width)  # two linears with biases, and a norm
    assert (part.gradients, part.moments) == (changed, 2 * changed)
    assert part.activations < whole.activations


def test_what_does_not_fit_is_refused_in_a_line() -> None:
    assert (available_bytes("cpu") or 0) > 1 << 20
    memory = Memory(parameters=10**9, parent=0, gradients=10**9, moments=2 * 10**9, activations=10**9)
    require_memory(memory, 5 * 10**9)
    require_memory(memory, None)  # where the system does not say
    with pytest.raises(UserError, match=r"training needs 5\.00 GB \(.*moments 2.*for each of 2 trials.*9\.00 GB"):
        require_memory(memory, 9 * 10**9, num_trials=2)
