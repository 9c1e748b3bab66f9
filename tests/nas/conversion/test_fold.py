import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from costmodel import ops
from costmodel.engine import spu
from costmodel.execution import interpreter
from costmodel.protocols.primitives import EngineSetting
from nas.conversion.change_of_basis import Basis, balanced
from nas.conversion.fold import fold
from nas.conversion.verified_fold import FIXED_POSITIONS, FRACTION_BITS, FoldCheck, Reference, fold_as_far_as
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights, load_deployed
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import Recipe
from nas.training.objective import Objective
from search_spaces.architecture import Architecture, Layer, default_final_norm
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.deployed import deployed
from search_spaces.forms import Norm
from search_spaces.lower import lower
from search_spaces.notation import ATTENTION_LETTERS, FFN_LETTERS, NORM_LETTERS, name_of, parse

TINY: Any = {"layers": 3, "heads": 2, "vocab": 24, "context": 6}
GPT2 = base_architecture("tiny", Dimensions(**TINY, d_model=16, d_ff=24))
PYTHIA = base_architecture("pythia-70m", Dimensions(**TINY, d_model=16, d_ff=24))
LLAMA = base_architecture("smollm2-135m", Dimensions(**TINY | {"heads": 4}, kv_heads=2, d_model=16, d_ff=24))
BASES = {
    "gpt2": GPT2,
    "pythia": PYTHIA,
    "sas": GPT2,
    "llama": LLAMA,
    "qwen2": replace(LLAMA, block="qwen2", head_size=6),
}
TOKENS = np.random.default_rng(5).integers(24, size=6)
NORMS, ATTENTIONS, FFNS = ("".join(table.values()) for table in (NORM_LETTERS, ATTENTION_LETTERS, FFN_LETTERS))
SEQ_LEN = 16
LEAST_ERROR = 2e-4  # what fixed point leaves of logits of a few units


@st.composite
def layers(draw: st.DrawFn, attentions: str, norms: str) -> str:
    attention, ffn = draw(st.sampled_from(attentions)), draw(st.sampled_from(FFNS + 3 * "F"))
    norm1 = draw(st.sampled_from(norms)) if attention != "o" else "o"
    norm2, stabiliser = (draw(st.sampled_from(letters)) if ffn != "o" else "o" for letters in (norms + "oo", "so"))
    return norm1 + attention + norm2 + ffn + stabiliser


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Any placement on any block, with as few norms as often as with many."""
    block = draw(st.sampled_from(list(BASES)))
    attentions = "STQPUB" if block == "sas" else ATTENTIONS
    norms = NORMS if BASES[block].block_facts.has_centred_norms else "Mmo"
    letters = [draw(layers(attentions, norms)) for _ in range(3)]
    if draw(st.booleans()):
        letters = [f"o{word[1]}o{word[3:]}" for word in letters]
    text = "-".join(["1x" + word for word in letters] + draw(st.sampled_from(([], *([letter] for letter in norms)))))
    base = replace(BASES[block], bias=draw(st.booleans()), tied_embeddings=draw(st.booleans()))
    return parse(f"HH({text})" if block == "sas" else text, base).architecture


def weights_of(architecture: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """No gain, bias, slope or scalar at its initial value, and every change of basis well-conditioned."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for node in lower(architecture, architecture.context):
        for suffix, shape in node.op.weight_shapes.items():
            normal = torch.randn(shape, generator=generator, dtype=torch.float64)
            if isinstance(node.op, ops.Linear | ops.TokenEmbedding | ops.PositionEmbedding | ops.VocabProjection):
                value = (0.1 if node.layer not in ("embed", "head") else 0.5) * normal
            else:
                value = (0.2 * normal).exp() if suffix != "bias" else 0.3 * normal
            weights[f"{node.name}.{suffix}"] = value
    if architecture.tied_embeddings:
        weights["logits.weight"] = weights["embed.weight"]
    return weights


def executed(architecture: Architecture, weights: Mapping[str, Tensor], tokens: np.ndarray = TOKENS) -> np.ndarray:
    arrays = {name: value.numpy() for name, value in weights.items()}
    return interpreter.execute(lower(architecture, len(tokens)), arrays, tokens)


def assert_same(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


def member(notation: str, base: Architecture = GPT2) -> Architecture:
    return parse(notation, base).architecture


@given(architectures(), st.integers(0, 3))
@example(member("SM+ScFFN"), 0)
@example(member("SM+ScFFN", replace(PYTHIA, bias=False)), 0)
@example(member("1xlSlFs-1xoolRo-1xlSlGs-l"), 0)  # every reader takes the mean away, so the final bias comes by it
@example(member("1xooooo-l", replace(GPT2, bias=False)), 0)  # a table takes up what no linear can
@example(member("1xoSoFs-1xoSoGs-1xoSoFs-l"), 0)  # the final norm stays
@example(member("1xMSoFs-1xoSMXs-1xoooFs-m"), 0)  # ahead of, between and behind live norms
@example(member("HH(1xlSlGs-1xlSmFs-1xoSoIo-m)", replace(GPT2, bias=False)), 0)
@example(member("1xoooFo-1xoHoRs-1xoooFs", PYTHIA), 0)
@example(member("1xMSMWo-1xmBmBs-1xMHMVo", LLAMA), 0)
@example(member("1xmSmFs-1xmHmBs-1xoBmWo-m", BASES["qwen2"]), 0)
@example(member("1xlBlBs-1xLSLWo-1xoSoFs", replace(GPT2, bias=False, num_kv_heads=1)), 0)
def test_weights_fold_as_the_rule_says_and_the_function_stays(architecture: Architecture, seed: int) -> None:
    weights = weights_of(architecture, seed)
    before = {name: value.clone() for name, value in weights.items()}
    folded = fold(architecture, weights, dtype=torch.float64)
    assert (folded.left, folded.architecture) == ((), deployed(architecture))
    named = {f"{node.name}.{weight}" for node in lower(folded.architecture, 6) for weight in node.op.weight_shapes}
    assert folded.weights.keys() == named
    assert_same(executed(folded.architecture, folded.weights), executed(architecture, weights), 1e-9)
    assert all(torch.equal(weights[name], value) for name, value in before.items())


@given(architectures())
@example(member("3xoSoFs"))
@example(member("3xlSlFo"))
def test_behind_a_first_live_norm_tables_and_first_layer_fold_alike_whatever_follows(architecture) -> None:
    """So a deployment may leave them to those who have the parent's."""
    norm: Norm = "layernorm" if architecture.block_facts.has_centred_norms else "rmsnorm"
    first, first_weights = Layer(norm1=norm, attention="softmax", norm2=norm, ffn="identity"), []
    for others in (architecture.layers[1:], (first, first)):
        layers = (first, *others)
        whole = replace(architecture, layers=layers, final_norm=default_final_norm(layers))
        weights = fold(whole, weights_of(whole), dtype=torch.float64).weights
        first_weights.append(
            {name: value for name, value in weights.items() if name.startswith(("embed", "pos", "layers.0."))}
        )
    torch.testing.assert_close(*first_weights, rtol=0, atol=0)


@pytest.mark.parametrize("attempt", range(4))
@given(architecture=architectures())
@example(architecture=member("3xoSoGs", PYTHIA))
@example(architecture=member("1xoSoFs-1xoSoGs-1xoSoFs", PYTHIA))
def test_what_cannot_be_turned_back_stays_and_says_why(attempt: int, architecture: Architecture) -> None:
    """An FFN that cancels its beta, or a beta of 0, forgets the stream; a low bound leaves the most."""
    weights = weights_of(architecture)
    for name, value in weights.items():
        if attempt == 0 and name.startswith("layers.1.") and name.endswith("fused.weight"):
            value.zero_()
        if attempt < 2 and name.startswith("layers.1.") and name.endswith("beta"):
            value.zero_()
    max_condition = {2: 1.0, 3: 2.0}.get(attempt, 1e8)
    folded = fold(architecture, weights, max_condition=max_condition, dtype=torch.float64)
    assert folded.condition <= max_condition
    assert (folded.left == ()) == (folded.architecture == deployed(architecture))
    assert all(": a basis of condition" in reason for reason in folded.left)
    assert_same(executed(folded.architecture, folded.weights), executed(architecture, weights), 1e-9)


def test_the_reason_names_the_layer_and_the_rest_is_folded() -> None:
    architecture = member("SM+ScFuFFN")
    weights = weights_of(architecture)
    beta, alpha = (weights[f"layers.1.ffn.residual.{name}"] for name in ("beta", "alpha"))
    weights["layers.1.ffn.fused.weight"] = -beta * alpha * torch.eye(16)
    folded = fold(architecture, weights)
    (reason,) = folded.left
    assert reason.startswith("layers.1.ffn: a basis of condition")
    assert name_of(folded.architecture) == "1xoSooo-1xoSoFo-1xoSooo"
    assert_same(executed(folded.architecture, folded.weights), executed(architecture, weights))


def test_an_ffn_that_only_adds_its_bias_vanishes_too() -> None:
    architecture = member("SM+ScFuFFN")
    weights = weights_of(architecture)
    for name, value in weights.items():
        if name.endswith(("fused.weight", "beta")):
            value.fill_(float(name.endswith("beta")))
    folded = fold(architecture, weights, dtype=torch.float64)
    assert (folded.condition, folded.architecture) == (1.0, deployed(architecture))
    assert torch.equal(folded.weights["embed.weight"], weights["embed.weight"])
    assert_same(executed(folded.architecture, folded.weights), executed(architecture, weights), 1e-9)


MEMBERS = [
    *product(
        (GPT2, PYTHIA), ("SM+LN+G", "SM(t)+LN+R", "SM+LN", "SM+ScFFN", "SM+ScFuFFN_i1", "1xoSoFs-1xoSLGs-1xoTooo")
    ),
    *product((GPT2,), ("HH(SM(t)+ScFuFFN_i1)", "HH(1xLSoFs-1xoSLRs-1xLSoFs)")),
]


def drawn(architecture: Architecture) -> Decoder:
    """No parameter at its initial value."""
    model = build(architecture, torch.Generator().manual_seed(0), temperature_init=0.5).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize(("base", "name"), MEMBERS)
def test_a_folded_trained_model_is_a_model_of_its_own(base: Architecture, name: str) -> None:
    model = drawn(member(name, base))
    folded = fold(model.architecture, deployed_weights(model))
    again = Decoder(folded.architecture)
    load_deployed(again, folded.weights)
    assert deployed_weights(again).keys() == folded.weights.keys()
    tokens = torch.from_numpy(TOKENS)[None]
    with torch.no_grad():
        assert_same(again(tokens).logits.numpy(), model(tokens).logits.numpy())


def test_one_temperature_per_head_goes_into_the_queries_and_folding_twice_is_refused() -> None:
    architecture = member("SM(t)+R")
    weights = weights_of(architecture)
    for index in range(3):
        weights[f"layers.{index}.attention.temperature.weight"] = torch.tensor([[1.3], [0.3]]).double().expand(2, 6)
    folded = fold(architecture, weights, dtype=torch.float64)
    assert all(layer.attention == "softmax" for layer in folded.architecture.layers)
    assert_same(executed(folded.architecture, folded.weights), executed(architecture, weights), 1e-9)
    architecture = member("SM+LN+G")
    folded = fold(architecture, weights_of(architecture))
    with pytest.raises(ValueError, match="only a model that is not folded yet"):
        fold(folded.architecture, folded.weights)


def test_balanced_bases_share_the_growth() -> None:
    """A step that shrinks one direction a millionfold: a thousand in the tables, a thousand in the projection."""
    matrix = torch.diag(torch.tensor([1.0, 1e-6], dtype=torch.float64))
    plain = torch.eye(2, dtype=torch.float64)
    first = balanced([Basis(plain, plain), Basis(matrix, torch.linalg.inv(matrix))])
    torch.testing.assert_close(first.axes @ first.inverse, plain)
    sizes = torch.linalg.vector_norm(first.axes, dim=0), torch.linalg.vector_norm(first.inverse, dim=1)
    assert sorted(round(math.log10(size)) for size in sizes[0].tolist()) == [0, 3]
    assert sorted(round(math.log10(size)) for size in sizes[1].tolist()) == [-3, 0]


BASE = base_architecture("tiny", Dimensions(layers=6, heads=2, d_model=16, vocab=24, context=32))
SEQUENCES = np.random.default_rng(5).integers(24, size=(20, 32))
ERRORS: dict[str, Any] = {"float_error": 1e-4, "fixed_error": 7e-5, "trained_fixed_error": 3e-5}
GOOD = FoldCheck(positions=640, agreement=0.999, fixed_divergence=2e-3, resolution=1e-5, **ERRORS)


def model(notation: str, *, shrink: float = 1.0) -> tuple[Architecture, dict[str, Tensor]]:
    """A model whose FFNs, where they are fused, leave half of the stream as it is and shrink the other half."""
    architecture = parse(notation, BASE).architecture
    weights = deployed_weights(build(architecture, torch.Generator().manual_seed(0)))
    rotation, _ = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
    change = torch.diag(torch.cat((torch.zeros(8), torch.full((8,), shrink - 1))))
    for name in weights:
        if name.endswith("fused.weight"):
            weights[name] = rotation @ change @ rotation.T
    return architecture, {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({}, True),  # each bar may be met exactly
        ({"float_error": 1.01e-4}, False),
        ({"float_error": float("nan")}, False),
        ({"agreement": 0.9989}, False),
        ({"fixed_error": 7.01e-5}, False),  # twice the trained model's, and a resolution
        ({"fixed_error": 7.01e-5, "fixed_divergence": 1e-3}, True),  # no prediction moves
        ({"fixed_error": 7.01e-5, "fixed_divergence": 1e-3, "outside": ("a",)}, False),
        ({"fixed_error": float("nan"), "fixed_divergence": float("nan")}, False),
        ({"outside": ("a",)}, False),
    ],
)
def test_every_bar_counts(change: dict[str, Any], passes: bool) -> None:
    assert replace(GOOD, **change).passes == passes


def test_a_well_conditioned_model_is_folded_as_the_rule_says() -> None:
    architecture, weights = model("SM+ScFuFFN", shrink=0.7)
    folded, check = fold_as_far_as(architecture, weights, SEQUENCES)
    assert folded.architecture == deployed(architecture)
    assert check.passes
    assert check == Reference.of(architecture, weights, SEQUENCES).check(folded)
    assert check.positions == SEQUENCES.size > FIXED_POSITIONS
    assert 0 < check.float_error < 1e-5
    assert 2.0**-FRACTION_BITS / 100 < check.trained_fixed_error < 1e-3


def test_folding_goes_back_until_fixed_point_holds_it() -> None:
    """Six layers that shrink a direction fiftyfold: all of them together are more than 18 fraction bits can hold."""
    architecture, weights = model("SM+ScFuFFN", shrink=0.02)
    everything = fold(architecture, weights, max_condition=1e15)
    assert everything.left == ()
    assert not Reference.of(architecture, weights, SEQUENCES).check(everything).keeps_precision
    folded, check = fold_as_far_as(architecture, weights, SEQUENCES)
    assert check.keeps_precision
    assert 0 < len(folded.left) < 6
    assert folded.condition < everything.condition


def test_a_model_that_was_folded_wrongly_fails() -> None:
    architecture, weights = model("SM+ScFuFFN", shrink=0.7)
    folded = fold(architecture, weights)
    name = "layers.3.attention.out.weight"
    moved = folded._replace(weights={**folded.weights, name: 1.01 * folded.weights[name]})
    check = Reference.of(architecture, weights, SEQUENCES).check(moved)
    assert check.float_error > 1e-4
    assert not check.passes


def test_what_the_ring_cannot_hold_is_told() -> None:
    """The same function, with a stream of 2^28: its products have 2^36 times as much, beyond 63 bits."""
    architecture, weights = model("SM_i6-o")
    folded = fold(architecture, weights)
    factor = 2.0**28
    large = dict(folded.weights)
    for name in large:
        if name.startswith(("embed.", "position.")) or name.endswith(("out.weight", "out.bias")):
            large[name] = large[name] * factor
        elif name.endswith(("qkv.weight", "logits.weight")):
            large[name] = large[name] / factor
    check = Reference.of(architecture, weights, SEQUENCES).check(folded._replace(weights=large))
    assert check.float_error < 1e-5
    assert check.outside == ("a number is 3.52 times its limit",)
    assert not check.passes


def engine_error(architecture: Architecture, weights: dict[str, Any], tokens: Any) -> float:
    """Largest difference of a logit under `semi2k` to the clear one."""
    graph, arrays = lower(architecture, SEQ_LEN), {name: value.double().numpy() for name, value in weights.items()}
    clear = interpreter.execute(graph, arrays, tokens)
    run = spu.run(graph, arrays, tokens, protocol="semi2k", setting=EngineSetting())
    return float(np.abs(np.asarray(run.logits) - clear).max())


@pytest.mark.slow
@pytest.mark.needs_engine
@pytest.mark.parametrize("name", ["SM+ScFuFFN", "SM+fLN+R", "1xoSoFs-1xoSoRo"])
def test_folding_costs_no_precision_under_the_engine(name: str) -> None:
    architecture = parse(name, base_architecture("tiny")).architecture
    generator = torch.Generator().manual_seed(0)
    model = Objective(Candidate(architecture=architecture, recipe=Recipe()), generator).model
    weights = dict(deployed_weights(model))
    if architecture.tied_embeddings:
        weights["logits.weight"] = weights["embed.weight"]
    tokens = np.arange(SEQ_LEN) * 7 % architecture.vocab_size
    folded = fold(architecture, weights)
    assert folded.architecture == deployed(architecture)
    trained_error = engine_error(architecture, weights, tokens)
    assert engine_error(folded.architecture, dict(folded.weights), tokens) <= 2 * trained_error + LEAST_ERROR
