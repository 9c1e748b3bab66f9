from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nas.conversion.transfer import transferred
from nas.model.decoder import Decoder, build
from nas.model.norms import frozen_norms
from nas.model.weights import deployed_weights, load_deployed
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
def test_half_of_the_heads_are_those_that_write_most(strongest: int) -> None:
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


@pytest.mark.parametrize("strongest", [0, 1])
def test_half_of_the_key_heads_keep_all_of_their_query_heads(strongest: int) -> None:
    source = build(LLAMA, torch.Generator().manual_seed(0))  # 2 key heads of 8 features, 2 query heads each
    group = slice(16 * strongest, 16 * strongest + 16)
    with torch.no_grad():
        source.get_parameter("layers.0.attention.out.weight")[:, group] *= 3
    target = parse("2xMHMWo", LLAMA).architecture
    before = deployed_weights(source)
    after = transferred(LLAMA, before, target)
    keys = slice(8 * strongest, 8 * strongest + 8)
    for linear, kept in (("q", group), ("k", keys), ("v", keys)):
        name = f"layers.0.attention.{linear}.weight"
        assert torch.equal(after[name], before[name][kept])
    assert torch.equal(after["layers.0.attention.out.weight"], before["layers.0.attention.out.weight"][:, group])


@pytest.mark.parametrize("name", ["SM+RMS+ReGLU", "2xMBMWo", "1xmSmVo-1xMBoWo"])
def test_gated_linears_are_kept_whatever_their_activation(name: str) -> None:
    before = deployed_weights(build(LLAMA, torch.Generator().manual_seed(0)))
    after = transferred(LLAMA, before, parse(name, LLAMA).architecture)
    assert all(torch.equal(before[key], value) for key, value in after.items() if key in before)
    model = Decoder(parse(name, LLAMA).architecture)
    load_deployed(model, after)


def test_an_attention_that_is_missing_is_dropped() -> None:
    source = made("SM+LN+G")
    weights = deployed_weights(started("1xooLGo-1xLSLGo", source))
    assert not any(name.startswith(("layers.0.attention", "layers.0.norm1")) for name in weights)
    assert torch.equal(weights["layers.0.ffn.up.weight"], deployed_weights(source)["layers.0.ffn.up.weight"])


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
