"""The op graph in the clear is the torch model: what is priced is what is trained."""

from itertools import product

import numpy as np
import pytest
import torch

from costmodel import execute
from nas.model import Decoder
from nas.weights import deployed_weights, weight_shapes
from search_spaces.architecture import Architecture
from search_spaces.decoder import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

GPT2 = base_architecture("tiny", Dimensions(vocab=40, context=16))
PYTHIA = base_architecture("pythia-70m", Dimensions(layers=2, heads=2, d_model=32, vocab=40, context=16))
NAMES = ("SM+LN+G", "SM+LN+R", "SM", "SM(t)+LN+LR", "SM+ScFFN", "SM+ScFuFFN_i1", "1xLSoGo-1xoTLRs", "1xoTLKs-1xoSooo")
SIMPLIFIED = ("HH(SM+G)", "HH(SM+ScFFN)", "HH(SM(t)+ScFuFFN_i1)", "HH(1xLSoFs-1xoSLRo)")
MEMBERS = [*product((GPT2, PYTHIA), NAMES), *product((GPT2,), SIMPLIFIED)]
RELATIVE_TOLERANCE = 1e-4


def drawn(architecture: Architecture, seed: int = 0) -> Decoder:
    """A model whose every weight matters: no gain, slope or scale at its initial value."""
    model = Decoder(architecture, temperature_init=0.5).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def some_tokens(architecture: Architecture, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(architecture.vocab_size, size=length)


def both_logits(architecture: Architecture, length: int = 11) -> tuple[np.ndarray, np.ndarray]:
    model = drawn(architecture)
    tokens = some_tokens(architecture, length)
    weights = {name: value.numpy() for name, value in deployed_weights(model).items()}
    ours = execute.execute(lower(architecture, length), weights, tokens)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    return ours, theirs


@pytest.mark.parametrize(("base", "name"), MEMBERS)
def test_logits_are_the_torch_models(base: Architecture, name: str) -> None:
    ours, theirs = both_logits(parse(name, base).architecture)
    np.testing.assert_allclose(ours, theirs, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE * np.abs(theirs).max())


def test_every_op_of_the_blocks_is_run() -> None:
    graphs = [lower(parse(name, base).architecture, 4) for base, name in MEMBERS]
    run = {type(node.op) for graph in graphs for node in graph}
    assert {op.__name__ for op in set(execute.FUNCTIONS) - run} <= {"KeyValueCache", "LastRow"}  # of other deployments


def test_weights_are_named_and_shaped_as_the_torch_models() -> None:
    for base, name in MEMBERS:
        for node in lower(parse(name, base).architecture, 16):
            assert execute.shapes(node.op) == weight_shapes(node.op)


def test_the_parity_can_fail() -> None:
    architecture = parse("SM+LN+G", GPT2).architecture
    model = drawn(architecture)
    weights = {name: value.numpy() for name, value in deployed_weights(model).items()}
    tokens = some_tokens(architecture, 11)
    logits = execute.execute(lower(architecture, 11), weights, tokens)
    weights["layers.1.ffn.up.bias"] = weights["layers.1.ffn.up.bias"] + 0.01
    assert np.abs(execute.execute(lower(architecture, 11), weights, tokens) - logits).max() > 1e-3
