"""Folding changes the architecture and never the logits."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from costmodel import ops
from costmodel.execution import interpreter
from nas.conversion.fold import fold, folded_placement
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights
from search_spaces.architecture import Architecture, Layer
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import name_of, parse

GPT2 = base_architecture("tiny", Dimensions(layers=3, vocab=40, context=16))
PYTHIA = base_architecture("pythia-70m", Dimensions(layers=3, heads=2, d_model=32, vocab=40, context=16))
NAMES = (
    "SM+LN+G",
    "SM(t)+LN+R",
    "SM+LN",
    "SM",
    "SM+R",
    "SM+ScFFN",
    "SM+ScFuFFN",
    "SM+ScFuFFN_i1",
    "1xoSoGs-1xoSoFo-1xoSoRs",
    "1xoSoFs-1xoSLGs-1xoTooo",
    "1xoSoFs-1xLSoFs-1xoSoFs",
)
SIMPLIFIED = ("HH(SM+G)", "HH(SM+ScFFN)", "HH(SM(t)+ScFuFFN_i1)", "HH(1xLSoFs-1xoSLRs-1xLSoFs)")
MEMBERS = [*product((GPT2, PYTHIA), NAMES), *product((GPT2,), SIMPLIFIED)]


def drawn(architecture: Architecture, spread: float = 0.1, seed: int = 0) -> Decoder:
    """No gain, bias, slope or scalar at its initial value."""
    model = build(architecture, torch.Generator().manual_seed(seed), temperature_init=0.5).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def executed(architecture: Architecture, weights: dict[str, Tensor], tokens: Tensor) -> np.ndarray:
    graph = lower(architecture, len(tokens))
    return interpreter.execute(graph, {name: value.numpy() for name, value in weights.items()}, tokens.numpy())


def some_tokens(length: int = 11) -> Tensor:
    return torch.randint(40, (length,), generator=torch.Generator().manual_seed(5))


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(("base", "name"), MEMBERS)
def test_the_folded_op_graph_is_the_trained_model(base: Architecture, name: str) -> None:
    model = drawn(parse(name, base).architecture)
    folded = fold(model.architecture, deployed_weights(model))
    tokens = some_tokens()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].numpy()
    assert_same(executed(folded.architecture, folded.weights, tokens), logits)


@pytest.mark.parametrize(("base", "name"), [(GPT2, "SM(t)+LN+R"), (PYTHIA, "SM+LN"), (GPT2, "HH(SM+ScFFN)")])
def test_a_folded_architecture_is_a_model_of_its_own(base: Architecture, name: str) -> None:
    model = drawn(parse(name, base).architecture)
    folded = fold(model.architecture, deployed_weights(model))
    again = Decoder(folded.architecture)
    weights = {
        name.replace("temperature.weight", "temperature.log_weight"): value.log() if "temperature" in name else value
        for name, value in folded.weights.items()
    }
    again.load_state_dict(weights)
    tokens = some_tokens()[None]
    with torch.no_grad():
        assert_same(again(tokens).logits.numpy(), model(tokens).logits.numpy())


def test_linears_without_biases_get_those_of_the_norms() -> None:
    model = drawn(replace(GPT2, bias=False))
    folded = fold(model.architecture, deployed_weights(model))
    assert folded.architecture.bias
    with torch.no_grad():
        logits = model(some_tokens()[None]).logits[0].numpy()
    assert_same(executed(folded.architecture, folded.weights, some_tokens()), logits)


@pytest.mark.parametrize(
    ("base", "name", "expected"),
    [
        (GPT2, "SM+LN", "3xLSLFo"),  # two linears become one
        (GPT2, "SM+ScFFN", "SM_i3"),  # and in a norm-free stream a change of basis
        (PYTHIA, "SM+ScFuFFN_i1", "SM_i3"),
        (GPT2, "SM+LN+G", "SM+LN+G"),
        (GPT2, "1xoSoGs-1xoSoFo-1xoSoRs", "1xoSoGo-1xoSooo-1xoSoRo"),
        (GPT2, "1xoSoFs-1xLSoFs-1xoSoFs", "1xoSooo-1xLSoFs-1xoSoFs"),  # from the first norm on the stream stays
        (GPT2, "HH(SM+ScFuFFN)", "HH(1xLSoFo-2xoSoFo)"),  # heads mix slices of the stream: no change of basis
    ],
)
def test_what_is_left(base: Architecture, name: str, expected: str) -> None:
    model = drawn(parse(name, base).architecture, spread=0.02)
    folded = fold(model.architecture, deployed_weights(model)).architecture
    assert name_of(folded) == expected
    assert not [node for node in lower(folded, 8) if isinstance(node.op, ops.AttentionScores) and node.op.scaled]


def test_norms_of_blocks_are_bare_and_the_final_one_is_not() -> None:
    model = drawn(GPT2)
    graph = lower(fold(GPT2, deployed_weights(model)).architecture, 8)
    assert [node.op.affine for node in graph if isinstance(node.op, ops.LayerNorm)] == [False] * 6 + [True]


def test_one_temperature_per_head_goes_into_the_queries() -> None:
    model = drawn(parse("SM(t)+R", GPT2).architecture)
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.temperature.log_weight.copy_(torch.tensor([[0.3], [-1.2]]).expand(2, 16))
    folded = fold(model.architecture, deployed_weights(model))
    assert all(layer.attention == "softmax" for layer in folded.architecture.layers)
    with torch.no_grad():
        assert_same(
            executed(folded.architecture, folded.weights, some_tokens()), model(some_tokens()[None]).logits[0].numpy()
        )


@pytest.mark.parametrize("name", ["SM+ScFuFFN", "3xoSoGs"])
def test_a_stream_that_cannot_be_turned_back_stays(name: str) -> None:
    """A fused FFN of -1 times the identity beside a beta of 1, or a beta of 0, forgets the stream."""
    model = drawn(parse(name, GPT2).architecture)
    ffn = model.layers[1].ffn
    with torch.no_grad():
        if ffn.fused is None:
            ffn.residual.beta.zero_()
        else:
            ffn.fused.weight.copy_(-ffn.residual.beta * ffn.residual.alpha * torch.eye(16))
    folded = fold(model.architecture, deployed_weights(model))
    assert folded.architecture.layers[1].ffn == model.architecture.layers[1].ffn
    assert (folded.architecture.layers[2].ffn == "none") == (name == "SM+ScFuFFN")
    with torch.no_grad():
        logits = model(some_tokens()[None]).logits[0].numpy()
    assert_same(executed(folded.architecture, folded.weights, some_tokens()), logits)


def test_the_same_placement_is_folded_at_other_dimensions() -> None:
    small, large = (parse("SM+ScFFN", replace(GPT2, d_model=width, d_ff=4 * width)).architecture for width in (16, 64))
    folded = fold(small, deployed_weights(drawn(small, spread=0.02))).architecture
    deployed = folded_placement(large, folded)
    assert (deployed.d_model, deployed.folded, deployed.tied_embeddings) == (64, True, False)
    assert deployed.layers == (Layer(ffn="none"),) * 3


def test_folding_twice_is_refused() -> None:
    model = drawn(GPT2)
    folded = fold(GPT2, deployed_weights(model))
    with pytest.raises(ValueError, match="only a model that is not folded yet"):
        fold(*folded)
