"""Layers at the client: where a graph is cut, what that costs, and that both halves compute the whole."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodel.deployment.client_layers import halves
from costmodel.deployment.deploy import Deployment
from costmodel.engine.compare import drawn_caches, drawn_weights
from costmodel.execution import interpreter
from costmodel.pricing.price import price
from costmodel.trust import at_client
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

SMALL = base_architecture("pythia-70m", Dimensions(layers=3, heads=2, d_model=16, vocab=50, context=32))
MODEL = parse("1xMSlGo-1xLTLEs-1xoSoRo", SMALL).architecture
TOKENS = np.array([3, 14, 15, 9, 26, 5, 35, 8])
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"phase": "decode"},
    {"projection": "last", "rows": "needed", "vocab_blocks": 2},
    {"query_block": 3},
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_layers", [0, 2, 3])
def test_the_stream_of_the_client_gives_the_logits_of_the_whole(num_layers, way):
    whole = lower(MODEL, 8, Deployment(**way))
    client, private = halves(whole, num_layers)
    assert private == lower(MODEL, 8, Deployment(client_layers=num_layers, **way))
    assert {node.layer for node in client} == {"embed", *range(num_layers)}
    generator = np.random.default_rng(0)
    weights, caches = drawn_weights(whole, generator), drawn_caches(whole, generator)
    tokens = TOKENS[-1:] if "phase" in way else TOKENS
    stream = interpreter.execute(client, weights, tokens, caches)
    shared = {**caches, client.nodes[-1].name: stream}
    logits = interpreter.execute(private, weights, None, shared)
    assert logits == pytest.approx(interpreter.execute(whole, weights, tokens, caches), abs=1e-12)


@pytest.mark.parametrize("num_layers", [-1, 4])
def test_layers_that_the_model_does_not_have_are_refused(num_layers):
    with pytest.raises(ValueError, match=f"from 0, the embedding alone, to the 3 layers .*, but got {num_layers}"):
        lower(MODEL, 8, Deployment(client_layers=num_layers))


def test_what_reads_the_embedding_again_is_not_cut():
    graph = lower(MODEL, 8)
    again = tuple(replace(node, inputs=("embed",)) if node.name == "layers.2.ffn.up" else node for node in graph)
    with pytest.raises(ValueError, match=r"but with 1 that reads layers.0.ffn.*, embed; choose another number"):
        halves(replace(graph, nodes=again), 1)
    assert halves(replace(graph, nodes=again), 0).private.inputs[0].name == "embed"


@pytest.mark.parametrize("protocol", ["published", "semi2k", "sigma", "crypten"])
def test_what_the_client_computes_costs_nothing(protocol):
    asked = {"layers": 3, "protocol": protocol, "seq_len": 8}
    whole, rest = (price("SM+LN+G", client_layers=layers, **asked) for layers in (None, 2))
    by_layer, left = dict(whole.estimate.by_layer), dict(rest.estimate.by_layer)
    assert set(left) == {2, "head"}
    assert all(left[layer] == by_layer[layer] for layer in left)
    assert "embedding and first 2 layers at the client: it has their weights" in rest.asked.whose
    assert [at_client(number) for number in (0, 1)] == ["embedding", "embedding and first layer"]
