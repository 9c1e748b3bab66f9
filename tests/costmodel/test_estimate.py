from dataclasses import fields

import pytest

from costmodel.cost import Price
from costmodel.estimate import Pricer, estimate
from costmodel.ops import Add, LayerNorm, Node, OpGraph


class Flat(Pricer):
    """Three seconds and one byte an op, rounds only for LayerNorm."""

    protocol = "flat"
    network = "lan"
    cost_model_id = "0"
    range_over = "nothing"

    def price(self, op):
        return Price(latency_s=3.0, sent_bytes=1.0, rounds=2 if isinstance(op, LayerNorm) else None)

    def latency_s_range(self, graph):
        return None

    def prior_share(self, graph):
        return None


def node(name, layer, op, *inputs):
    return Node(name=name, layer=layer, op=op, inputs=inputs)


def test_an_estimate_adds_up_by_layer_and_by_op():
    norm, add = LayerNorm(rows=1, features=1), Add(rows=1, features=1)
    graph = OpGraph(
        nodes=(
            node("a", "embed", norm, "tokens"),
            node("b", 0, norm, "a"),
            node("c", 0, add, "a", "b"),
            node("d", "head", norm, "c"),
        )
    )
    found = estimate(graph, Flat())
    assert [layer for layer, _ in found.by_layer] == ["embed", 0, "head"]
    assert [price.latency_s for _, price in found.by_layer] == [3.0, 6.0, 3.0]
    assert [price.rounds for _, price in found.by_layer] == [2, None, 2]
    assert (found.total.latency_s, found.total.sent_bytes, found.total.rounds) == (12.0, 4.0, None)
    assert [op_node.name for op_node, _ in found.by_op] == ["a", "b", "c", "d"]
    assert (found.protocol, found.network, found.latency_s_range) == ("flat", "lan", None)


def test_a_price_has_no_other_fields_than_the_definitions_name():
    assert {field.name for field in fields(Price)} == {
        "latency_s",
        "sent_bytes",
        "rounds",
        "messages",
        "online_bytes",
        "setup_bytes",
        "compute_s",
        "network_s",
    }


def test_a_pricer_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Pricer()
