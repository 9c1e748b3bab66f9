import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nas.corpus.corpus import Corpus
from nas.model.bf16_products import rounded
from nas.model.decoder import build
from nas.model.weights import load_deployed
from nas.recipe.candidate import candidate_at
from nas.recipe.recipe import SCALES, EntropyRegularisation, Normalisation, PenaltyForm, Recipe
from nas.training.batches import AHEAD, Prefetched
from nas.training.distillation.teacher import CachedTeacher, LiveTeacher, teacher_of
from nas.training.objective import EntropyPenalty, Objective, summarise
from nas.training.optimizer import Muon, learning_rate, optimizers, orthogonalised
from search_spaces.bases import BASES
from search_spaces.notation import parse
from tests.nas.study.conftest import untrained_parent
from tests.nas.training.short_runs import candidate

# 100 steps of 8 x 32 tokens, 10 of them warm-up, peak 1, floor 0.1.
SCALE = replace(SCALES["smoke"], tokens=100 * 256, warmup_share=0.1, learning_rate=1.0)
LARGEST = math.log(4)  # 1.3863 nats: the goldens have sequences of 4 tokens


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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_renews_the_copies_of_weights_in_bf16(optimizer):
    made = candidate("SM+LN+G", SCALE)
    objective = Objective(made, torch.Generator().manual_seed(0))
    weights = [parameter for parameter in objective.parameters() if parameter.ndim == 2]
    before = [rounded(weight).detach().clone() for weight in weights]
    for parameter in objective.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in optimizers(objective, replace(made.recipe, optimizer=optimizer)):
        each.step()
    for weight, copy in zip(weights, before, strict=True):
        assert rounded(weight).equal(weight.bfloat16())
        assert not rounded(weight).equal(copy)


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


def test_query_heads_that_share_a_key_head_are_matrices_as_large_as_the_keys():
    llama = BASES["smollm2-135m"]
    narrow: Any = {"d_model": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 16, "layers": llama.layers[:1]}
    model = build(replace(llama, block="phi3", **narrow), torch.Generator().manual_seed(0))
    _, muon = optimizers(model, Recipe(scale=SCALE, optimizer="muon"))
    packed: Any = model.get_submodule("layers.0.attention.qkv").weight
    (group,) = [group for group in muon.param_groups if any(weight is packed for weight in group["params"])]
    assert (tuple(packed.shape), group["packed"]) == ((64, 32), 4)  # two of queries, one of keys, one of values
    packed.grad = torch.ones_like(packed)
    muon.step()


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


def penalty(entropies: list, **settings) -> tuple[EntropyPenalty, torch.Tensor]:
    tensor = torch.tensor(entropies, dtype=torch.float64)
    layers, _, heads, _ = tensor.shape
    module = EntropyPenalty(EntropyRegularisation(**settings), num_layers=layers, num_heads=heads).double()
    return module, module(tensor)


def test_both_forms_by_hand():
    # One layer, one sequence, two heads. Head 0: mean (0 + 0.2 + 0.6 + 0.8) / 4 = 0.4; head 1: mean 1.0.
    # Threshold 0.5, so the centre is 0.5 ln 4 = 0.6931; margin 0.2, so the half-width is 0.2773.
    # Head 0: d = 0.4 - 0.6931 = -0.2931, outside, penalty 0.08593. Head 1: d = 0.3069, outside, penalty 0.09416.
    rows = [[[[0.0, 0.2, 0.6, 0.8], [0.7, 0.9, 1.1, 1.3]]]]
    _, value = penalty(rows, margin=0.2, threshold_init=0.5)
    assert value.item() == pytest.approx(((0.4 - 0.5 * LARGEST) ** 2 + (1.0 - 0.5 * LARGEST) ** 2) / 2)
    # A wider band, 0.3 x 1.3863 = 0.4159, holds both.
    assert penalty(rows, margin=0.3, threshold_init=0.5)[1].item() == 0.0
    # Centre 0.6931, half-width 0.2773: of the rows 0.0, 0.6, 0.8, 1.2 the first and the last are outside.
    _, value = penalty([[[[0.0, 0.6, 0.8, 1.2]]]], form="published-code", margin=0.2, threshold_init=0.5)
    assert value.item() == pytest.approx((0.0 - 0.5 * LARGEST) ** 2 + (1.2 - 0.5 * LARGEST) ** 2)


def test_causal_maximum_by_hand():
    # Rows can reach ln 1, ln 2, ln 3, ln 4 = 0, 0.6931, 1.0986, 1.3863; their mean is ln(4!) / 4 = 0.7945.
    # Threshold 0.5, margin 0.2. Mean form: the head's mean is 0.65, d = 0.65 - 0.3973 = 0.2527 > 0.1589.
    rows = [[[[0.0, 0.6, 0.8, 1.2]]]]
    _, value = penalty(rows, maximum="causal", margin=0.2, threshold_init=0.5)
    assert value.item() == pytest.approx((0.65 - 0.5 * math.log(24) / 4) ** 2)
    # By rows: d = 0, 0.2534 > 0.1386, 0.2507 > 0.2197, 0.5069 > 0.2773; the first row cannot be outside its band.
    _, value = penalty(rows, form="published-code", maximum="causal", margin=0.2, threshold_init=0.5)
    expected = sum((row - 0.5 * math.log(i)) ** 2 for i, row in ((2, 0.6), (3, 0.8), (4, 1.2)))
    assert value.item() == pytest.approx(expected)


def test_the_weight_is_constant_or_rises_linearly():
    assert {EntropyRegularisation(weight=0.4).weight_at(step, 10) for step in range(10)} == {0.4}
    rising = EntropyRegularisation(weight=0.4, warmup_share=0.4)
    assert [rising.weight_at(step, 10) for step in (0, 1, 3, 4, 9)] == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.4])


def test_mean_form_does_not_depend_on_the_batch_and_the_summed_one_doubles_with_it():
    entropies = torch.rand(2, 1, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    repeated = entropies.repeat(1, 2, 1, 1)
    factors: dict[PenaltyForm, int] = {"mean": 1, "published-code": 2}
    for form, factor in factors.items():
        module = EntropyPenalty(EntropyRegularisation(form=form, margin=0.0), num_layers=2, num_heads=3)
        assert module(repeated).item() == pytest.approx(factor * module(entropies).item())


@pytest.mark.parametrize("form", ["mean", "published-code"])
def test_layers_of_unlike_heads_count_by_their_heads(form):
    # Three heads in one layer, or as 2 + 0 + 1 in three: the same penalty, and gradients for the thresholds that count.
    rows = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # batch x heads x T
    settings = EntropyRegularisation(form=form, margin=0.0)
    together = EntropyPenalty(settings, num_layers=1, num_heads=3)([rows])
    module = EntropyPenalty(settings, num_layers=3, num_heads=2)
    apart = module([rows[:, :2], rows[:, :0], rows[:, 2:]])
    assert apart.item() == pytest.approx(together.item())
    apart.backward()
    assert (module.thresholds.grad != 0).tolist() == [[True, True], [False, False], [True, False]]


def test_thresholds_learn_towards_the_entropies_they_see():
    module, value = penalty([[[[1.3] * 4]]], threshold_init=0.3)
    value.backward()
    gradient = module.thresholds.grad
    # d(E - theta ln T)^2 / d theta = -2 ln T (E - theta ln T): negative, so a descent step raises theta.
    assert gradient.item() == pytest.approx(-2 * LARGEST * (1.3 - 0.3 * LARGEST), rel=1e-6)


def test_diagnosis_counts_quarters_collapse_and_overload():
    # Largest mean 4.0, T = 128: quarters end at 1, 2, 3; collapse below 0.02 ln 128 = 0.097.
    summary = summarise([torch.tensor([0.05, 0.5, 1.5, 2.5]), torch.tensor([3.0, 3.5, 4.0, 0.99])], 128)
    assert (summary.quarter_shares, summary.num_collapsed) == ((3 / 8, 1 / 8, 1 / 8, 3 / 8), 1)
    assert summary.flags == ("entropy-collapse", "entropic-overload")

    assert summarise([torch.tensor([1.0, 1.5, 2.5, 4.0])], 128).flags == ()  # an even spread raises none
    summary = summarise([torch.zeros(2)] * 2, 128)
    assert (summary.num_collapsed, summary.quarter_shares) == (4, (1.0, 0.0, 0.0, 0.0))
    summary = summarise([torch.tensor([1.0, 4.0]), torch.zeros(0), torch.tensor([2.0])], 128)
    assert summary.head_means == ((1.0, 4.0), (), (2.0,))
    assert summary.quarter_shares == (0.0, 1 / 3, 1 / 3, 1 / 3)


def test_impossible_settings_and_entropies_are_refused():
    with pytest.raises(ValueError, match="must be finite"):
        summarise([torch.tensor([1.0, math.nan])], 128)
    bad: Any
    for bad in ({"weight": -1.0}, {"margin": 2.0}, {"threshold_init": math.nan}, {"warmup_share": 1.1}):
        with pytest.raises(ValueError, match="entropy regularisation needs"):
            EntropyRegularisation(**bad)


@pytest.mark.parametrize("num_heads", [0, 1])
def test_layers_may_all_have_fewer_heads_than_there_are_thresholds(num_heads):
    """So it is once the gates of attention have closed, in all layers or all but half of the heads."""
    module = EntropyPenalty(EntropyRegularisation(), num_layers=2, num_heads=2)
    value = module([torch.full((3, num_heads, 4), 0.1, requires_grad=True)] * 2)
    value.backward()
    assert value.isfinite()
    assert (value > 0) == (num_heads > 0)
