import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from costmodel import ops
from costmodel.execution import interpreter
from costmodel.execution.op_functions import evaluate, numpy_library
from costmodel.ops import SoftmaxForm
from nas.attention.reference import row_bounds
from nas.model.decoder import TRAINED, Decoder, build
from nas.model.mpc_friendly import FORMS, PiecewiseGelu, normalised_attention
from nas.model.norms import MEMORY, FrozenNorm, follow_deviations, freezing_steps, frozen_norms
from nas.model.self_attention import norm_of
from nas.model.settings import norm_settings
from nas.model.weights import (
    LINEARS,
    chosen_linears,
    deployed_weights,
    load_deployed,
    load_stored,
    normalise,
    stored_weights,
)
from nas.recipe.candidate import Candidate, candidate_id
from nas.recipe.recipe import SCALES, Freezing, Normalisation, NormalisedLinears, Recipe
from nas.training import checkpoint
from nas.training.objective import Objective
from nas.training.trainer import TrainingRun, train
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.forms import Norm
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.nas.training import short_runs
from tests.nas.training.short_runs import SCALE
from tests.small_models import GPT2

Drawn = TypeVar("Drawn", bound=nn.Module)
FROZEN: dict[Norm, Norm] = {"layernorm": "frozen-layernorm", "rmsnorm": "frozen-rmsnorm"}
EIGHT_WIDE, EPSILON = base_architecture("tiny", Dimensions(d_model=8)), 1e-5
STREAM = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
NAMES = ["layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2", "final_norm"]


def drawn(module: Drawn) -> Drawn:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def decoder(name: str = "SM+fLN+R") -> Decoder:
    return drawn(build(parse(name, GPT2).architecture, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_until_it_is_frozen_it_is_the_norm_it_stands_for(kind):
    frozen, live = (drawn(norm_of(norm_settings(EIGHT_WIDE, norm), TRAINED)) for norm in (FROZEN[kind], kind))
    torch.testing.assert_close(frozen(STREAM), live(STREAM))


@pytest.mark.parametrize("centred", [True, False])
def test_once_frozen_it_divides_every_position_by_the_running_mean(centred):
    norm = drawn(FrozenNorm(8, EPSILON, centred=centred))
    norm(STREAM)
    norm.follow()
    norm.set_frozen()
    from_centre = STREAM - STREAM.mean(dim=-1, keepdim=True) if centred else STREAM
    sigma = from_centre[:, 1:].square().mean(dim=-1).sqrt().mean()  # position 0 does not count
    bias = norm.bias if centred else 0.0
    torch.testing.assert_close(norm(STREAM), norm.weight * from_centre / sigma + bias)
    norm(7 * STREAM)
    norm.follow()
    torch.testing.assert_close(norm.deviation, sigma)  # constant from now on


def test_the_running_mean_forgets_sees_a_single_position_and_a_validation_moves_nothing():
    norm = FrozenNorm(8, EPSILON, centred=True)
    norm(STREAM)
    norm.follow()
    first = norm.deviation
    with torch.no_grad():
        norm(5 * STREAM)
    norm.follow()
    assert torch.equal(norm.deviation, first)
    for part in (4 * STREAM, 6 * STREAM):  # two passes of one step
        norm(part)
    norm.follow()
    torch.testing.assert_close(norm.deviation, MEMORY * first + (1 - MEMORY) * 5 * first)
    norm = FrozenNorm(8, EPSILON, centred=True)
    norm(STREAM[:, :1])
    norm.follow()
    assert norm.deviation != 1


def frozen_decoder() -> Decoder:
    model = decoder()
    model(TOKENS)
    follow_deviations(model)
    for norm in frozen_norms(model).values():
        norm.set_frozen()
    return model


def test_norms_are_listed_in_order_of_execution():
    names = " ".join(frozen_norms(decoder("1xlSLRo-1xlSmRo-l")))
    assert names == "layers.0.norm1 layers.1.norm1 layers.1.norm2 final_norm"


def test_deployed_gains_have_taken_up_the_constant_and_load_back_frozen_or_not():
    model = frozen_decoder()
    weights = deployed_weights(model)
    norm = model.layers[0].norm1
    assert isinstance(norm, FrozenNorm)
    torch.testing.assert_close(weights["layers.0.norm1.weight"], norm.weight / norm.sigma)
    assert not [name for name in weights if name.endswith(("sigma", "frozen"))]
    again = decoder()
    load_deployed(again, weights)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    for name, value in deployed_weights(again).items():
        assert torch.equal(value, weights[name]), name
    source, model = decoder("SM+LN+R"), decoder()
    live = {f"{name}.frozen": torch.zeros(()) for name in frozen_norms(model)}
    load_deployed(model, deployed_weights(source) | live)
    torch.testing.assert_close(model(TOKENS).logits, source(TOKENS).logits)


def test_files_keep_the_state():
    model = frozen_decoder()
    model.layers[1].norm2.set_frozen(False)
    again = decoder()
    load_stored(again, {name: value.clone() for name, value in stored_weights(model).items()})
    states: list[list[bool]] = [[norm.is_frozen for norm in frozen_norms(net).values()] for net in (model, again)]
    assert states[0] == states[1] == [True, True, True, False, True]
    logits: list[Tensor] = [net(TOKENS).logits for net in (model, again)]
    assert torch.equal(*logits)


WRITTEN_OUT: dict[SoftmaxForm, Callable[[float], float]] = {
    "2quad": lambda score: (score + 5) ** 2,
    "power8": lambda score: score**8,
    "relu": lambda score: max(score, 0.0),
}


def heads(length: int = 7, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values: 2 x 3 x length x 4, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(2, 3, length, 4, generator=generator, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("form", FORMS)
def test_output_and_entropy_are_those_written_out(form):
    queries, keys, values = heads()
    output, entropy = normalised_attention(queries, keys, values, form=form)
    for row in range(7):
        scores = [float(queries[1, 2, row] @ keys[1, 2, column]) / 2 for column in range(row + 1)]  # sqrt(4) = 2
        positive = [WRITTEN_OUT[form](score) for score in scores]
        weights = [value / (sum(positive) + (2**-10 if form == "relu" else 0.0)) for value in positive]
        expected = sum(weight * values[1, 2, column] for column, weight in enumerate(weights))
        torch.testing.assert_close(output[1, 2, row], torch.as_tensor(expected, dtype=torch.float64).expand(4))
        shares = [value / sum(positive) for value in positive if value > 0]
        assert float(entropy[1, 2, row]) == pytest.approx(-sum(share * math.log(share) for share in shares), abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_entropy_is_between_0_and_that_of_a_uniform_row_with_the_right_gradients(form):
    entropy = normalised_attention(*heads(length=50), form=form).entropy
    assert (entropy >= 0).all()
    assert (entropy <= row_bounds(50)).all()
    uniform = normalised_attention(*(torch.ones(1, 1, 50, 4, dtype=torch.float64),) * 3, form=form)
    torch.testing.assert_close(uniform.entropy[0, 0], row_bounds(50))
    inputs = tuple(operand[:1, :1].clone().requires_grad_() for operand in heads(length=5))
    assert torch.autograd.gradcheck(lambda *operands: tuple(normalised_attention(*operands, form=form)), inputs)


def test_a_row_without_a_positive_score_attends_to_nothing_so_queries_of_0_cannot_start():
    queries = torch.ones(1, 1, 3, 4).requires_grad_()
    output, entropy = normalised_attention(queries, -torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), form="relu")
    (output.sum() + entropy.sum()).backward()
    assert output.abs().max() == entropy.abs().max() == 0
    assert queries.grad.isfinite().all()
    architecture = parse("HH(SM+G)", base_architecture("tiny", Dimensions(softmax="relu"))).architecture
    Decoder(architecture)  # trained weights can be loaded
    with pytest.raises(ValueError, match="block 'sas' starts from queries of 0, where softmax 'relu' has no gradient"):
        build(architecture, torch.Generator())


def test_piecewise_gelu_is_the_op_graphs_and_finite_far_out():
    source = np.linspace(-8, 8, 100_001)
    ours = PiecewiseGelu()(torch.from_numpy(source)).numpy()
    op = ops.Gelu(rows=1, features=len(source), form="piecewise")
    np.testing.assert_allclose(ours, evaluate(op, numpy_library(), {}, source[None])[0], atol=1e-9)
    far = torch.tensor([-1e30, -6.0, -3.0, 0.0, 2.0, 1e30], requires_grad=True)
    result = PiecewiseGelu()(far)
    result.sum().backward()
    assert result[[0, 5]].tolist() == [0.0, far[5].item()]
    assert far.grad[[0, 1, 5]].tolist() == [0.0, 0.0, 1.0]
    assert far.grad.isfinite().all()


Kind: TypeAlias = Literal["weight", "spectral"]
KINDS: tuple[Kind, ...] = ("weight", "spectral")


def made(kind: Kind, linears: NormalisedLinears, name: str = "SM") -> Decoder:
    generator = torch.Generator().manual_seed(0)
    model = build(parse(name, GPT2).architecture, generator)
    normalise(model, Normalisation(kind=kind, linears=linears), generator)
    return model


def linears_of_ffns(model: Decoder) -> list[nn.Module]:
    return [
        model.get_submodule(f"layers.{index}.ffn.{name}")
        for index in range(len(model.layers))
        for name in ("up", "down")
    ]


def train_a_little(model: nn.Module, some_tokens: Callable[..., Tensor], steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        logits = model(some_tokens(seed=step)).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), some_tokens(seed=step + 1).flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "linears", "name"), list(product(KINDS, LINEARS, ("SM", "SM+LN+G", "SM+ScFuFFN", "1xLHoRo-1xooMRo")))
)
def test_the_deployed_op_graph_is_the_trained_model(kind, linears, name, some_tokens):
    model = made(kind, linears, name)
    train_a_little(model, some_tokens)
    tokens = some_tokens()
    with torch.no_grad():
        logits = model(tokens).logits[0]
    weights = {name: value.double().numpy() for name, value in deployed_weights(model).items()}
    again = interpreter.execute(lower(model.architecture, 11), weights, tokens[0].numpy())
    np.testing.assert_allclose(again, logits.numpy(), rtol=1e-5, atol=1e-5 * logits.abs().max().item())


@pytest.mark.parametrize("linears", LINEARS)
def test_the_listed_linears_are_normalised_and_no_others(linears):
    plain, normed = build(GPT2, torch.Generator().manual_seed(0)), made("spectral", linears, "SM+LN+G")
    before, after = deployed_weights(plain), deployed_weights(normed)
    changed = {name for name in before if not torch.allclose(before[name], after[name], rtol=1e-5)}
    expected = {f"layers.{index}.{name}.weight" for index, name in product((0, 1), LINEARS[linears])}
    assert changed == expected & before.keys()
    if linears.startswith("qk"):
        queries, keys, values = after["layers.0.attention.qkv.weight"].chunk(3)
        for matrix in (queries, keys, values) if linears.startswith("qkv") else (queries, keys):
            assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(1, abs=0.1)
        _, _, before_values = before["layers.0.attention.qkv.weight"].chunk(3)
        assert torch.equal(before_values, values) != linears.startswith("qkv")


def test_queries_that_share_keys_are_normalised_in_matrices_as_large_as_the_keys():
    shared = replace(GPT2, num_kv_heads=1)
    model = build(shared, torch.Generator().manual_seed(0))
    parts: dict[NormalisedLinears, int] = {"qk": 2, "qkv+ffn": 3}
    for linears, num_parts in parts.items():
        linear, num_rows, num_matrices = chosen_linears(model, Normalisation(kind="spectral", linears=linears))[0]
        widths = [shared.d_model, shared.head_dim, shared.head_dim][:num_parts]
        assert (linear.out_features, num_rows) == (shared.d_model + 2 * shared.head_dim, sum(widths))
        assert num_matrices == sum(widths) // shared.head_dim


def test_weight_normalisation_starts_at_the_weight_and_trains_as_torchs_own(some_tokens):
    ours, theirs = made("weight", "ffn"), build(parse("SM", GPT2).architecture, torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(some_tokens()).logits, theirs(some_tokens()).logits)
    for linear in linears_of_ffns(theirs):
        parametrizations.weight_norm(linear)
    for model in (ours, theirs):
        train_a_little(model, some_tokens)
    torch.testing.assert_close(ours(some_tokens()).logits, theirs(some_tokens()).logits, rtol=1e-4, atol=1e-5)


def test_spectral_normalisation_is_torchs_own_once_the_power_method_has_settled(some_tokens):
    ours, theirs = made("spectral", "ffn"), build(parse("SM", GPT2).architecture, torch.Generator().manual_seed(0))
    ours, theirs = ours.double(), theirs.double()
    for linear in linears_of_ffns(theirs):
        parametrizations.spectral_norm(linear)
    for _ in range(300):  # both power methods begin at random; 60 steps leave up to 2e-5 in the logits, 200 2e-14
        logits = ours(some_tokens()).logits, theirs(some_tokens()).logits
    torch.testing.assert_close(*logits, rtol=1e-8, atol=1e-10)


def test_validation_moves_no_singular_vector_and_weights_from_elsewhere_have_their_own(some_tokens):
    model = made("spectral", "qkvo+ffn")
    before = {name: value.clone() for name, value in stored_weights(model).items()}
    with torch.no_grad():
        model(some_tokens())
    assert all(torch.equal(before[name], value) for name, value in stored_weights(model).items())
    model, other = made("spectral", "qk"), build(GPT2, torch.Generator().manual_seed(7))
    load_deployed(model, {name: 3 * value for name, value in deployed_weights(other).items() if "qkv" in name})
    for matrix in deployed_weights(model)["layers.0.attention.qkv.weight"].chunk(3)[:2]:
        assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_model_goes_on_as_if_it_had_not_been_stored(kind, some_tokens):
    model, again = made(kind, "qkvo+ffn", "SM+LN+G"), made(kind, "qkvo+ffn", "SM+LN+G")
    train_a_little(model, some_tokens)
    load_stored(again, {name: value.clone() for name, value in stored_weights(model).items()})
    for decoder in (model, again):
        train_a_little(decoder, some_tokens)
    assert torch.equal(model(some_tokens()).logits, again(some_tokens()).logits)


def test_a_recipe_normalises_its_candidate():
    recipe = Recipe(scale=SCALES["smoke"], normalisation=Normalisation(kind="weight", linears="qk"), slopes="global")
    objective = Objective(
        Candidate(architecture=base_architecture("tiny"), recipe=recipe), torch.Generator().manual_seed(0)
    )
    assert "layers.1.attention.qkv.parametrizations.weight.original0" in stored_weights(objective.model)


@pytest.mark.parametrize(
    ("name", "linears", "message"),
    [("HH(SM+ScFFN)", "qk", "needs block 'gpt2' or 'opt' or 'pythia'"), ("SM_i2", "ffn", "has nothing to act on")],
)
def test_what_cannot_be_normalised_is_refused(name, linears, message):
    with pytest.raises(ValueError, match=message):
        made("weight", linears, name)


def candidate(name: str = "SM+fLN+R", tokens: int = SCALE.tokens, **recipe) -> Candidate:
    return short_runs.candidate(name, replace(SCALE, tokens=tokens), **recipe)


def test_norms_are_frozen_one_after_another():
    steps = freezing_steps(NAMES, Freezing(start_share=0.4, end_share=0.8), 100)
    order = ("layers.0.norm1", "layers.1.norm1", "layers.0.norm2", "layers.1.norm2", "final_norm")
    assert steps == dict(zip(order, (40, 50, 60, 70, 80), strict=True))
    assert freezing_steps(["final_norm"], Freezing(), 100) == {"final_norm": 40}  # one alone
    for share, num_steps in product((0.0, 1.0), (1, 7)):
        steps = freezing_steps(NAMES, Freezing(start_share=share, end_share=share), num_steps)
        assert set(steps.values()) <= set(range(1, num_steps + 1))


def test_the_span_names_a_candidate_where_there_are_norms_to_freeze_and_must_be_possible():
    for start, end in ((0.5, 0.4), (-0.1, 0.4), (0.5, 1.1), (float("nan"), 0.5)):
        with pytest.raises(ValueError, match="freezing needs 0 <= `start_share` <= `end_share` <= 1"):
            Freezing(start_share=start, end_share=end)
    other = Freezing(end_share=0.9)
    assert candidate_id(candidate("SM+LN+R", freezing=other)) == candidate_id(candidate("SM+LN+R"))
    assert candidate_id(candidate(freezing=other)) != candidate_id(candidate())


def test_a_run_freezes_by_the_number_of_the_step(corpus):
    run = TrainingRun(candidate(), corpus, seed=0, folder=None, device="cpu", initial={})
    norms = frozen_norms(run.objective.model)
    due = freezing_steps(list(norms), Freezing(), 16)
    for step in range(1, 17):
        run.step()
        assert {name for name, norm in norms.items() if norm.is_frozen} == {
            name for name, turn in due.items() if turn <= step
        }
    assert all(norm.is_frozen for norm in norms.values())


@pytest.mark.parametrize("name", ["SM+fLN+R", "SM+fRMS+G", "1xlSMRo-1xooLRo-m"])
@pytest.mark.parametrize("num_steps", [1, 2, 16])
def test_a_completed_run_has_every_such_norm_frozen(corpus, tmp_path, name, num_steps):
    made = candidate(name, tokens=num_steps * 64)
    *_, outcome = train(made, corpus, seed=0, folder=tmp_path)
    assert outcome.status == "completed"
    model = Objective(made, torch.Generator()).model
    load_stored(model, checkpoint.load_latest(tmp_path).weights)
    assert frozen_norms(model)
    assert all(norm.is_frozen and norm.sigma > 0 for norm in frozen_norms(model).values())


def test_weights_that_were_frozen_stay_so_from_the_first_step(corpus):
    made = candidate()
    names = frozen_norms(Objective(made, torch.Generator()).model)
    gains = {f"{name}.weight": torch.full((made.trained.d_model,), 2.0) for name in names}
    run = TrainingRun(made, corpus, seed=0, folder=None, device="cpu", initial=gains)
    run.step()
    assert all(norm.is_frozen and norm.deviation == 1 for norm in frozen_norms(run.objective.model).values())
