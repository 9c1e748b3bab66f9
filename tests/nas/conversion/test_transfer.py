from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nas.conversion.linear_fit import fitted_linears
from nas.conversion.transfer import FARTHEST_VERTEX, gate_of, transferred
from nas.model.decoder import Decoder, build
from nas.model.norms import frozen_norms
from nas.model.weights import deployed_weights, load_deployed
from nas.recipe.distillation import Part, fitted_parts
from search_spaces.architecture import Architecture
from search_spaces.notation import parse
from tests.small_models import GPT2, LLAMA


def made(name: str) -> Decoder:
    model = build(parse(name, GPT2).architecture, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return model


def started(name: str, source: Decoder, context: int = 16) -> Decoder:
    model = build(replace(parse(name, GPT2).architecture, context=context), torch.Generator().manual_seed(9))
    load_deployed(model, transferred(source.architecture, deployed_weights(source), model.architecture))
    return model


def assert_same(model: Decoder, other: Decoder, tokens: Tensor) -> None:
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "target", "context"),
    [
        *((name, name, 16) for name in ("SM+LN+G", "SM", "SM+LN+LR")),
        ("SM+LN", "2xLSLFo", 16),  # a fused FFN is the product of two linears
        ("SM+LN+G", "SM(t)+LN+G", 16),  # a temperature starts at one
        ("SM+LN+G", "SM+LN+G", 9),  # a shorter context keeps its positions
    ],
)
def test_the_same_function_starts_as_it_ended(source: str, target: str, context: int, some_tokens) -> None:
    model = made(source)
    assert_same(started(target, model, context), model, some_tokens(length=9))


def test_linears_are_kept_whatever_is_between_them_and_what_is_missing_is_dropped() -> None:
    source = made("SM+LN+G")
    weights, before = deployed_weights(started("1xoSoRs-1xoSooo", source)), deployed_weights(source)
    assert {name for name in weights if name not in before} == {
        "layers.0.ffn.residual.alpha",
        "layers.0.ffn.residual.beta",
    }
    assert all(torch.equal(before[name], value) for name, value in weights.items() if name in before)
    without = deployed_weights(started("1xooLGo-1xLSLGo", source))
    assert not any(name.startswith(("layers.0.attention", "layers.0.norm1")) for name in without)
    assert torch.equal(without["layers.0.ffn.up.weight"], before["layers.0.ffn.up.weight"])


@pytest.mark.parametrize(("source", "target"), [("SM+LN+G", "SM+fLN+G"), ("SM+RMS+R", "SM+fRMS+R")])
def test_a_norm_to_be_frozen_starts_live_with_its_gain_and_bias(source: str, target: str, some_tokens) -> None:
    model = made(source)
    start = started(target, model)
    assert not any(norm.is_frozen for norm in frozen_norms(start).values())
    assert_same(start, model, some_tokens(length=9))


def test_a_norm_that_was_frozen_stays_so_and_keeps_its_constant(some_tokens: Callable[..., Tensor]) -> None:
    source = made("SM+fLN+G")
    with torch.no_grad():
        for norm in frozen_norms(source).values():
            norm.sigma.fill_(0.3)
            norm.set_frozen()
    start = started("SM+fLN+G", source)
    assert all(norm.is_frozen for norm in frozen_norms(start).values())
    assert_same(start, source, some_tokens(length=9))


def test_rmsnorm_takes_the_gain_of_layernorm() -> None:
    source = made("SM+LN+G")
    before, after = deployed_weights(source), deployed_weights(started("SM+RMS+G", source))
    assert torch.equal(after["layers.0.norm1.weight"], before["layers.0.norm1.weight"])
    assert "layers.0.norm1.bias" not in after


@pytest.mark.parametrize("strongest", [0, 1])
def test_half_of_the_heads_are_those_that_write_most_with_all_of_their_query_heads(strongest: int) -> None:
    source = made("SM+LN+G")  # 2 heads of 8 features
    head = slice(8 * strongest, 8 * strongest + 8)
    with torch.no_grad():
        source.get_parameter("layers.0.attention.qkv.weight")[32:][head] *= 2
    before, after = deployed_weights(source), deployed_weights(started("2xLHLGo", source))
    for name in ("weight", "bias"):
        packed = before[f"layers.0.attention.qkv.{name}"]
        kept = torch.cat([part[head] for part in packed.split(16)])
        assert torch.equal(after[f"layers.0.attention.qkv.{name}"], kept)
    assert torch.equal(after["layers.0.attention.out.weight"], before["layers.0.attention.out.weight"][:, head])
    assert torch.equal(after["layers.0.attention.out.bias"], before["layers.0.attention.out.bias"])
    source = build(LLAMA, torch.Generator().manual_seed(0))  # 2 key heads of 8 features, 2 query heads each
    group = slice(16 * strongest, 16 * strongest + 16)
    with torch.no_grad():
        source.get_parameter("layers.0.attention.out.weight")[:, group] *= 3
    target = parse("2xMHMWo", LLAMA).architecture
    before = deployed_weights(source)
    after = transferred(LLAMA, before, target)
    keys = slice(8 * strongest, 8 * strongest + 8)
    for linear, rows in (("q", group), ("k", keys), ("v", keys)):
        name = f"layers.0.attention.{linear}.weight"
        assert torch.equal(after[name], before[name][rows])
    assert torch.equal(after["layers.0.attention.out.weight"], before["layers.0.attention.out.weight"][:, group])


@pytest.mark.parametrize("name", ["SM+RMS+ReGLU", "2xMBMWo", "1xmSmVo-1xMBoWo"])
def test_gated_linears_are_kept_whatever_their_activation(name: str) -> None:
    before = deployed_weights(build(LLAMA, torch.Generator().manual_seed(0)))
    after = transferred(LLAMA, before, parse(name, LLAMA).architecture)
    assert all(torch.equal(before[key], value) for key, value in after.items() if key in before)
    model = Decoder(parse(name, LLAMA).architecture)
    load_deployed(model, after)


@pytest.mark.parametrize(
    ("source", "target", "changes", "message"),
    [
        ("SM+LN+G", "SM", {"vocab_size": 41}, "`vocab_size` must be that of the weights, 40, but is 41"),
        ("SM+LN+G", "SM", {"d_model": 32}, "`d_model` must be that of the weights"),
        ("SM+LN+G", "SM", {"num_kv_heads": 1}, "`num_kv_heads` must be that of the weights, None, but is 1"),
        ("SM+LN+G", "SM", {"d_ff": 32}, "must have the shape"),
        ("SM+LN+G", "SM", {"context": 17}, "`context` must be at most that of the weights, 16, but is 17"),
        ("SM+LN+G", "HH(SM+ScFFN)", {}, "`block` must be that of the weights, 'gpt2', but is 'sas'"),
        ("SM+ScFuFFN", "SM+G", {}, "the weights must hold 'layers.0.ffn.up.weight'"),
        ("2xoHoRo", "SM+R", {}, "`layers.0.attention.qkv.weight` must have the shape"),
        ("SM_i2", "SM+ScFuFFN", {}, "the weights must hold 'layers.0.ffn.fused.weight'"),
    ],
)
def test_weights_of_other_dimensions_are_refused(source: str, target: str, changes: dict, message: str) -> None:
    model = made(source)
    architecture = replace(parse(target, GPT2).architecture, **changes)
    with pytest.raises(ValueError, match=message):
        transferred(model.architecture, deployed_weights(model), architecture)


def test_weights_that_are_not_numbers_are_refused() -> None:
    model = made("SM")
    weights = deployed_weights(model)
    weights["embed.weight"] = weights["embed.weight"].clone()
    weights["embed.weight"][3, 1] = torch.nan
    with pytest.raises(ValueError, match="weights must be finite, but 'embed.weight' holds NaN or infinity"):
        load_deployed(model, weights)


TOKENS = torch.randint(40, (32, 16), generator=torch.Generator().manual_seed(1))


def parent_and_student(base: Architecture, theirs: str, ours: str, queries: float = 1.0) -> tuple[Decoder, Decoder]:
    """queries: how much longer than at the start those of the parent are."""
    parent = build(parse(theirs, base).architecture, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in parent.named_parameters():
            parameter.mul_(3.0 if "ffn" in name else 1.0)
            parameter.mul_(queries if name.endswith((".q.weight", ".qkv.weight")) else 1.0)
            parameter.add_(0.1 if name.endswith("bias") else 0.0)
    student = Decoder(parse(ours, base).architecture)
    load_deployed(student, transferred(parent.architecture, deployed_weights(parent), student.architecture))
    return parent, student


def error(parent: Decoder, student: Decoder) -> float:
    with torch.no_grad():
        return float((student(TOKENS).logits - parent(TOKENS).logits).square().mean())


def fit(parent: Decoder, student: Decoder) -> list[Part]:
    parts = fitted_parts(student.architecture, parent.architecture)
    load_deployed(student, fitted_linears(parent, student, parts, TOKENS))
    return parts


@pytest.mark.parametrize(
    ("base", "theirs", "ours", "fitted"),
    [
        (LLAMA, "SM+RMS+SwiGLU", "2xMSMBo", [Part(0, "ffn"), Part(1, "ffn")]),
        (LLAMA, "SM+RMS+ReGLU", "1xMSMVo-1xMSMBo", [Part(1, "ffn")]),
        (LLAMA, "SM+RMS+SwiGLU", "1xMSMBo-1xMSMFo", [Part(0, "ffn"), Part(1, "ffn")]),
        (LLAMA, "SM+RMS+SwiGLU", "1xMSMWo-1xMSMQo", [Part(1, "ffn")]),
        (LLAMA, "SM+RMS+GeGLU", "1xMSMAo-1xMSMQo", [Part(1, "ffn")]),
        (replace(GPT2, block="opt"), "SM+LN+R", "1xLSLRo-1xLSLXo", [Part(1, "ffn")]),
        (GPT2, "SM+LN+G", "2xLSLQo", [Part(0, "ffn"), Part(1, "ffn")]),
        (GPT2, "SM+LN+G", "1xLSLGo-1xLSLXo", [Part(1, "ffn")]),
        (GPT2, "SM+LN+G", "2xLSLBo", [Part(0, "ffn"), Part(1, "ffn")]),
        (LLAMA, "SM+RMS+SwiGLU", "2xMPMWo", [Part(0, "attention"), Part(1, "attention")]),
        (GPT2, "SM+LN+G", "2xLPLGo", [Part(0, "attention"), Part(1, "attention")]),
        (GPT2, "2xoSoGs", "2xoSoFs", [Part(0, "ffn"), Part(1, "ffn")]),
    ],
)
def test_a_fit_is_nearer_to_the_parent_than_the_start(base, theirs: str, ours: str, fitted: list[Part]) -> None:
    parent, student = parent_and_student(base, theirs, ours, queries=12.0 if "P" in ours else 1.0)
    before = error(parent, student)
    assert fit(parent, student) == fitted
    assert error(parent, student) < 0.75 * before


def test_a_norm_after_a_fitted_ffn_may_have_gains_of_0_as_in_gemma_3() -> None:
    parent, student = parent_and_student(replace(LLAMA, block="gemma2"), "SM+RMS+GeGLU", "2xMSMFo")
    with torch.no_grad():
        for model in (parent, student):
            model.layers[1].ffn.norm.weight[:2] = 0.0
    before = error(parent, student)
    fit(parent, student)
    assert error(parent, student) < 0.75 * before


def test_a_square_without_a_gate_is_not_fitted_and_squared_gates_are_nearer_than_linear_ones() -> None:
    gated, square = (parse(name, LLAMA).architecture for name in ("SM+RMS+SwiGLU", "1xMSMXo-1xMSMQo"))
    assert fitted_parts(square, gated) == [Part(1, "ffn")]
    errors = []
    for ours in ("2xMSMQo", "2xMSMBo"):
        parent, student = parent_and_student(LLAMA, "SM+RMS+SwiGLU", ours)
        fit(parent, student)
        errors.append(error(parent, student))
    assert errors[0] < 0.1 * errors[1]


@pytest.mark.parametrize("square", [0.2, -0.2, 1e-9, 0.0])
@pytest.mark.parametrize("slope", [0.5, -0.5])
def test_a_squared_gate_is_the_polynomial_as_far_as_that_has_roots(square: float, slope: float) -> None:
    wanted = torch.tensor([[0.1, -0.3, 0.0, 5.0], [slope] * 4, [square] * 4], dtype=torch.float64)
    root, shift, scale = gate_of(tuple(wanted))
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    made = scale * ((root * x + shift).square() - 1)
    near = 1e-9 if abs(square) > 0.1 else abs(slope) * 4 / (2 * FARTHEST_VERTEX)
    has_roots = slope**2 > 4 * square * wanted[0]
    errors = (made - (wanted[0] + slope * x + square * x.square())).abs().amax(dim=0)
    assert (errors[has_roots] <= near + 1e-9).all()
    assert made.isfinite().all()
    # of a channel that is always 0
    assert all(value.isfinite().all() for value in gate_of(tuple(torch.zeros(3, 2, dtype=torch.float64))))


def test_a_square_is_a_bilinear_ffn_to_the_last_digit() -> None:
    """u * u is (1 u + 0) u."""
    parent, student = parent_and_student(GPT2, "SM+LN+SQ", "2xLSLBo")
    fit(parent, student)
    assert error(parent, student) < 1e-4 * error(student, Decoder(student.architecture))
