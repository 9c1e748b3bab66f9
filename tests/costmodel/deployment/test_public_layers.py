from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodel.deployment.client_layers import halves
from costmodel.deployment.deploy import Deployment
from costmodel.deployment.public_layers import public_layers
from costmodel.engine.compare import drawn_caches, drawn_weights
from costmodel.execution import interpreter
from costmodel.pricing.price import price
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting
from costmodel.trust import at_client
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

SMALL = base_architecture("gpt2-small", Dimensions(layers=3, heads=2, d_model=16, vocab=50, context=32))
MODEL = parse("1xMSlGo-1xLTLEs-1xoSoRo", SMALL).architecture
TRUNCATED = {"semi2k": 2 * 4, "aby3": 3 * 4 + 2 * 8}  # bytes an element, all parties: see `_truncate`


def test_numbers_ranges_and_ends_are_layers():
    assert public_layers("0-2,7") == {0, 1, 2, 7}
    assert public_layers("embed,3,head") == {"embed", 3, "head"}


@pytest.mark.parametrize("text", ["", "-1", "2-1", "0-", "0,,1", "all", "0 - 1", "12345"])
def test_what_names_no_layer_is_refused(text):
    with pytest.raises(
        ValueError, match="`public_layers` must be layers from 0, ranges of them, .* such as 0-5,7, but"
    ):
        Deployment(public_layers=text)


def test_layers_that_the_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match="layers of the model, whose last one is 2, but has 3, 4; leave out"):
        lower(MODEL, 8, Deployment(public_layers="1-4"))


@pytest.mark.parametrize("way", [{}, {"phase": "decode"}, {"projection": "last", "rows": "needed", "vocab_blocks": 2}])
def test_hidden_weights_of_those_layers_alone_are_public(way):
    graph, plain = (lower(MODEL, 8, Deployment(public_layers=layers, **way)) for layers in ("1,head", None))
    assert [node.name for node in graph] == [node.name for node in plain]
    hidden = {node.name for node in plain if node.op.hides_weights}
    assert {node.name for node in graph if node.op.hides_weights} == {
        node.name for node in plain if node.name in hidden and node.layer not in (1, "head")
    }


@pytest.mark.parametrize("weights", ["secret", "server"])
@pytest.mark.parametrize("protocol", TRUNCATED)
def test_of_a_linear_with_public_weights_the_truncation_is_left(protocol, weights):
    pricer = load_pricer(protocol, setting=EngineSetting(weights=weights))
    op = next(node.op for node in lower(MODEL, 8, Deployment(public_layers="0")) if node.name == "layers.0.ffn.up")
    assert pricer.price(op).sent_bytes == TRUNCATED[protocol] * 8 * 64


def test_there_is_no_deployed_form_where_folding_gives_layers_other_numbers():
    for name, is_priced in {"3xLSLGo": True, "1xLSLGo-1xooooo-1xLSLGo": False}.items():
        priced = price(name, layers=3, protocol="semi2k", public_layers="0-1", seq_len=8)
        assert (priced.deployed is not None) == is_priced


@pytest.mark.parametrize("protocol", ["published", "sigma", "crypten"])
def test_protocols_without_formulas_of_public_weights_refuse_them(protocol):
    op = lower(MODEL, 8, Deployment(public_layers="embed")).nodes[0].op
    with pytest.raises(
        ValueError, match=f"but got protocol {protocol}, .*; price under one of those, or with no layer"
    ):
        load_pricer(protocol).price(op)


SMALL_PYTHIA = base_architecture("pythia-70m", Dimensions(layers=3, heads=2, d_model=16, vocab=50, context=32))


CLIENT_MODEL = parse("1xMSlGo-1xLTLEs-1xoSoRo", SMALL_PYTHIA).architecture


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
    whole = lower(CLIENT_MODEL, 8, Deployment(**way))
    client, private = halves(whole, num_layers)
    assert private == lower(CLIENT_MODEL, 8, Deployment(client_layers=num_layers, **way))
    assert {node.layer for node in client} == {"embed", *range(num_layers)}
    generator = np.random.default_rng(0)
    weights, caches = drawn_weights(whole, generator), drawn_caches(whole, generator)
    tokens = TOKENS[-1:] if "phase" in way else TOKENS
    stream = interpreter.execute(client, weights, tokens, caches)
    shared = {**caches, client.nodes[-1].name: stream}
    logits = interpreter.execute(private, weights, None, shared)
    assert logits == pytest.approx(interpreter.execute(whole, weights, tokens, caches), abs=1e-12)


@pytest.mark.parametrize("num_layers", [-1, 4])
def test_layers_that_the_client_cannot_have_are_refused(num_layers):
    with pytest.raises(ValueError, match=f"from 0, the embedding alone, to the 3 layers .*, but got {num_layers}"):
        lower(CLIENT_MODEL, 8, Deployment(client_layers=num_layers))


def test_what_reads_the_embedding_again_is_not_cut():
    graph = lower(CLIENT_MODEL, 8)
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
