import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nas.corpus.corpus import Corpus
from nas.model.weights import load_deployed
from nas.recipe.candidate import candidate_at
from nas.recipe.recipe import SCALES, EntropyRegularisation, Normalisation, Recipe
from nas.training.batches import AHEAD, Prefetched
from nas.training.distillation.teacher import CachedTeacher, LiveTeacher, teacher_of
from nas.training.objective import Objective
from nas.training.optimizer import Muon, learning_rate, optimizers, orthogonalised
from search_spaces.bases import BASES
from search_spaces.notation import parse
from tests.nas.study.conftest import untrained_parent
from tests.nas.training.short_runs import candidate

# 100 steps of 8 x 32 tokens, 10 of them warm-up, peak 1, floor 0.1.
SCALE = replace(SCALES["smoke"], tokens=100 * 256, warmup_share=0.1, learning_rate=1.0)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ("cosine", 0, 0.1),
        ("cosine", 9, 1.0),
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.55),  # half way from 10 to 100: 0.1 + 0.9 x (1 + cos(pi / 2)) / 2
        ("linear", 55, 0.55),
        ("linear", 91, 0.19),  # 0.1 + 0.9 x 9 / 90
        ("cosine", 85, 0.1603),  # 75 of 90 steps are 150 degrees: 0.1 + 0.9 x (1 - 0.8660) / 2
    ],
)
def test_schedule_by_hand(schedule, step, rate):
    assert learning_rate(Recipe(scale=SCALE, schedule=schedule), step) == pytest.approx(rate, abs=1e-4)


def test_only_weights_of_linears_and_tables_decay():
    made = candidate("1xLTLKs-1xoSoFs", SCALE, entropy=EntropyRegularisation())
    objective = Objective(made, torch.Generator().manual_seed(0))
    names = {id(parameter): name for name, parameter in objective.named_parameters()}
    decayed, rest = optimizers(objective, made.recipe)[0].param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    kinds = {names[id(parameter)].removeprefix("model.layers.0.") for parameter in decayed["params"]}
    linears = {f"{name}.weight" for name in ("attention.qkv", "attention.out", "ffn.up", "ffn.down")}
    assert {kind for kind in kinds if not kind.startswith("model.")} == linears
    undecayed = {names[id(parameter)].rpartition(".")[2] for parameter in rest["params"]}
    assert undecayed == {"weight", "bias", "log_weight", "slope", "alpha", "beta", "thresholds"}


def test_every_step_comes_once_in_order_and_is_begun_early():
    made, begun = [], threading.Event()

    def make(step):
        made.append((step, threading.current_thread() is threading.main_thread()))
        if step == AHEAD:
            begun.set()
        return step * 10

    batches = Prefetched(make)
    assert batches(0) == 0
    assert begun.wait(timeout=30)  # though nobody has asked for it
    assert [batches(step) for step in range(1, 6)] == [10, 20, 30, 40, 50]
    batches.close()
    assert [step for step, _ in made][:6] == list(range(6))
    assert not any(in_main for _, in_main in made)


def test_an_error_is_raised_where_its_step_is_asked_for():
    def make(step):
        if step == 1:
            raise OSError("gone")
        return step

    batches = Prefetched(make)
    assert batches(0) == 0
    with pytest.raises(OSError, match="gone"):
        batches(1)
    assert batches(2) == 2
    batches.close()


TOKENS = torch.arange(64).view(4, 16)


@pytest.fixture
def objectives(corpus: Corpus):
    """Objectives of a candidate that starts from a parent, by the weight of hidden states; and the teacher."""
    parent = untrained_parent(corpus, output_scale=4.0)

    def of(name: str, hidden_states: float):
        candidate = candidate_at(
            parse(name, BASES["tiny"]), "smoke", data="stdlib", distillation=parent.distillation, seq_len=16
        )
        distillation = replace(parent.distillation, hidden_state_weight=hidden_states)
        candidate = replace(candidate, recipe=replace(candidate.recipe, distillation=distillation))
        objective = Objective(candidate, torch.Generator().manual_seed(0))
        load_deployed(objective.model, parent.start(candidate, corpus))
        return objective, teacher_of(parent, corpus, candidate.recipe, "cpu")

    return of


@torch.no_grad()
def test_streams_weigh_in_the_loss_as_the_schedule_says(objectives):
    objective, teacher = objectives("SM+LN+R", 10.0)
    hidden_states, theirs = list[Tensor](), list[Tensor]()
    objective.model.features(TOKENS, with_entropies=False, hidden_states=hidden_states)
    teacher.model.features(TOKENS, with_entropies=False, hidden_states=theirs)
    (lesson,) = teacher.lessons(range(4), TOKENS, 1, predictions=True, hidden_states=True)
    error = lesson.hidden_state_error(hidden_states)
    assert error > 0.01
    losses = [objective(TOKENS, TOKENS, given)[0] for given in (lesson, lesson._replace(hidden_state_error=None))]
    torch.testing.assert_close(losses[0] - losses[1], 10 * error)
    norms = teacher.model.layers[1].norm1, teacher.model.final_norm
    by_hand = [
        [((ours - parent)[:, at] ** 2).mean() / (parent[:, at] ** 2).mean() for at in range(16)]
        for norm, *both in zip(norms, hidden_states[1:], theirs[1:], strict=True)
        for ours, parent in [map(norm, both)]
    ]
    torch.testing.assert_close(error, torch.tensor(by_hand).mean(), rtol=1e-3, atol=0.0)  # kept in half precision


def test_a_parent_leaves_what_it_leaves_in_lowered_products_too(objectives):
    objective, teacher = objectives("SM+LN+G", 1.0)
    hidden_states = list[Tensor]()
    objective.model.features(TOKENS, with_entropies=False, hidden_states=hidden_states)
    assert teacher.hidden_state_error(teacher.hidden_states(range(4), TOKENS), hidden_states) < 1e-6
    objective, teacher = objectives("SM+LN+G", 10.0)
    teacher = LiveTeacher(teacher.model, lowered=True)
    (lesson,) = teacher.lessons(range(4), TOKENS, 1, predictions=True, hidden_states=True)
    _, losses = objective(TOKENS, TOKENS, lesson)
    assert lesson.hidden_state_error is not None
    assert 0 < losses.distillation < 1e-3  # from itself
    assert lesson.hidden_state_error(objective.model.hidden_states(TOKENS)) < 1e-3
    assert teacher.model.layers[0].ffn.up.weight.dtype == torch.bfloat16
    assert teacher.model.embed.weight.dtype == teacher.model.final_norm.weight.dtype == torch.float32


def test_a_parent_beside_the_model_teaches_as_one_with_cached_outputs(objectives):
    results = []
    for is_live in (True, False):
        objective, teacher = objectives("SM+LN+R", 10.0)
        parent, inputs = teacher.model, TOKENS * 5 % 300
        teacher = LiveTeacher(parent, lowered=False) if is_live else CachedTeacher(parent, 512)
        (lesson,) = teacher.lessons(range(4), inputs, 1, predictions=False, hidden_states=True)
        assert lesson.hidden_state_error is not None
        error = lesson.hidden_state_error(objective.model.hidden_states(inputs)).detach()
        lessons = teacher.lessons(range(4), inputs, 2, predictions=True, hidden_states=True)
        losses = objective.backward(inputs, inputs, num_parts=2, penalty_weight=0.0, lessons=lessons)
        results.append((error, *losses, *(value.grad for value in objective.parameters())))
    for live, cached in zip(*results, strict=True):
        torch.testing.assert_close(live, cached, rtol=1e-4, atol=1e-6)
    ours, theirs = (model(inputs).logits.double().log_softmax(-1) for model in (objective.model, parent))
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    torch.testing.assert_close(results[0][3], divergence, rtol=1e-5, atol=0.0)


def test_gradients_are_of_the_streams_too(objectives):
    gradients = []
    for weight in (0.0, 10.0):
        objective, teacher = objectives("SM+LN+R", weight)
        lessons = teacher.lessons(range(4), TOKENS, 2, predictions=True, hidden_states=weight > 0)
        objective.backward(TOKENS, TOKENS, num_parts=2, penalty_weight=0.0, lessons=lessons)
        gradients.append(objective.model.layers[0].ffn.down.weight.grad)
    assert not torch.allclose(gradients[0], gradients[1], rtol=0.1)


def plain_iteration(matrix: Tensor) -> Tensor:
    """Newton-Schulz on the matrix itself, as its authors print it."""
    result = matrix / matrix.norm()
    for _ in range(5):
        gram = result @ result.T
        result = 3.4445 * result + (-4.7750 * gram + 2.0315 * gram @ gram) @ result
    return result


@pytest.mark.parametrize("shape", [(4, 4), (4, 9), (1, 3)])
def test_iterating_on_the_gram_matrix_is_iterating_on_the_matrix(shape):
    drawn = torch.randn((3, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.stack([plain_iteration(matrix) for matrix in drawn])
    torch.testing.assert_close(orthogonalised(drawn), expected, rtol=1e-9, atol=1e-9)


def test_two_steps_are_the_formula():
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 3, generator=generator, dtype=torch.float64))
    expected, momentum = weight.detach().clone(), torch.zeros(6, 3, dtype=torch.float64)
    optimizer = Muon([(weight, 1)], lr=0.1, weight_decay=0.5)
    for _ in range(2):
        gradient = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        ahead = 0.05 * gradient + 0.95 * momentum
        step = 0.2 * 6**0.5 * plain_iteration(ahead.T).T
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * step
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-9)


def test_packed_matrices_move_as_if_each_were_a_weight():
    generator = torch.Generator().manual_seed(0)
    packed = nn.Parameter(torch.randn(12, 4, generator=generator))
    parts = [nn.Parameter(part.clone()) for part in packed.detach().split(4)]
    packed.grad = torch.randn(12, 4, generator=generator)
    for part, gradient in zip(parts, packed.grad.split(4), strict=True):
        part.grad = gradient.clone()
    Muon([(packed, 3)], lr=0.1, weight_decay=0.1).step()
    Muon([(part, 1) for part in parts], lr=0.1, weight_decay=0.1).step()
    torch.testing.assert_close(packed.detach(), torch.cat([part.detach() for part in parts]))


def test_what_has_no_gradient_and_a_matrix_of_zeros_stay():
    assert orthogonalised(torch.zeros(1, 2, 3)).equal(torch.zeros(1, 2, 3))
    weight = nn.Parameter(torch.ones(2, 2))
    Muon([(weight, 1)], lr=0.1, weight_decay=0.1).step()
    assert weight.equal(torch.ones(2, 2))


def test_the_weights_of_the_layers_linears_are_muons_and_all_else_adamws():
    made = candidate("1xLTLKs-1xoSoFs", optimizer="muon")
    objective = Objective(made, torch.Generator().manual_seed(0))
    names = {parameter: name for name, parameter in objective.named_parameters()}
    rest, muon = [
        {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in optimizers(objective, made.recipe)
    ]
    attention = {f"model.layers.{layer}.attention.{name}.weight" for layer in (0, 1) for name in ("qkv", "out")}
    ffns = {"model.layers.0.ffn.up.weight", "model.layers.0.ffn.down.weight", "model.layers.1.ffn.fused.weight"}
    assert muon == attention | ffns
    assert rest == set(names.values()) - muon


@pytest.mark.parametrize("normalisation", [None, Normalisation(kind="weight", linears="qkv+ffn")])
def test_queries_keys_and_values_are_three_matrices(normalisation):
    made = candidate("SM+LN+G", optimizer="muon", normalisation=normalisation)
    objective = Objective(made, torch.Generator().manual_seed(0))
    _, muon = optimizers(objective, made.recipe)
    packed = {parameter: group["packed"] for group in muon.param_groups for parameter in group["params"]}
    named = [(name, packed[parameter]) for name, parameter in objective.named_parameters() if parameter in packed]
    assert len(named) == 8
    assert all(count == (3 if ".qkv." in name else 1) for name, count in named)
