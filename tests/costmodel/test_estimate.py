from dataclasses import asdict, fields

import pytest

from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.estimate import Pricer, estimate
from costmodel.ops import Add, LayerNorm, Node, OpGraph, Tanh
from costmodel.protocols import TRUST, load_pricer
from costmodel.report.estimates import op_records, price_numbers, total_document


class Flat(Pricer):
    """Three seconds and one byte an op, rounds only for LayerNorm."""

    protocol = "flat"
    network = "lan"
    cost_model_id = "0"
    range_over = "nothing"
    trust = TRUST["published"]

    def price(self, op):
        return Price(latency_s=3.0, sent_bytes=1.0, rounds=2 if isinstance(op, LayerNorm) else None)


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


class Distinct(Flat):
    """A power of ten of its own for every field of a price, so that no sum of one is a sum of another."""

    def price(self, op):
        return Price(**{field.name: 10**digit for digit, field in enumerate(fields(Price))})


def test_every_field_of_a_price_is_summed_and_reported():
    add = Add(rows=1, features=1)
    layers = ("embed", 0, 0, 1, 1, 1)
    nodes = tuple(node(str(index), layer, add, "tokens") for index, layer in enumerate(layers))
    found = estimate(OpGraph(nodes=nodes), Distinct())
    names = [field.name for field in fields(Price)]
    for price, num_ops in [(found.total, 6), *zip((price for _, price in found.by_layer), (1, 2, 3), strict=True)]:
        assert asdict(price) == {name: num_ops * 10**digit for digit, name in enumerate(names)}
    total = total_document(found)
    for part in (total, price_numbers(found.by_layer[0][1]), *op_records(found)):
        assert set(names) <= set(part)
    assert {name: total[name] for name in names} == asdict(found.total)


def test_a_pricer_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Pricer()  # type: ignore[abstract]


def test_an_op_without_a_formula_is_named_by_its_node():
    op = Tanh(rows=1, features=32)
    graph = OpGraph(nodes=(Node(name="bert.pooler.activation", layer="head", op=op, inputs=("tokens",)),))
    with pytest.raises(UserError) as refusal:
        estimate(graph, load_pricer("published"))
    assert str(refusal.value) == (
        "op 'bert.pooler.activation' must have a price: protocol published has no formula for Tanh, which no printed "
        "row has; choose protocol semi2k, aby3 or cheetah."
    )
    for protocol in ("semi2k", "aby3", "cheetah"):
        assert estimate(graph, load_pricer(protocol)).total.latency_s > 0
