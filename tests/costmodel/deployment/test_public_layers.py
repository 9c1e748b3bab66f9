"""Public layers: what is written, what it changes of a graph and of its price, and who refuses it."""

import pytest

from costmodel.deployment.deploy import Deployment
from costmodel.deployment.public_layers import public_layers
from costmodel.pricing.price import price
from costmodel.protocols import load_pricer
from costmodel.protocols.primitives import EngineSetting
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
