from dataclasses import asdict, fields
from typing import Any

import pytest

from costmodel.cost import Price
from costmodel.errors import UserError
from costmodel.estimate import Pricer, estimate
from costmodel.ops import Add, Node, OpGraph, Tanh
from costmodel.protocols import TRUST, load_pricer
from costmodel.report.estimates import op_records, price_numbers, total_document


class Distinct(Pricer):
    """A power of ten of its own for every field of a price, so that no sum of one is a sum of another."""

    protocol, network, cost_model_id, range_over = "distinct", "lan", "0", "nothing"
    trust = TRUST["published"]

    def price(self, op):
        return Price(**{field.name: 10**digit for digit, field in enumerate(fields(Price))})


def test_every_field_of_a_price_is_summed_and_reported():
    add = Add(rows=1, features=1)
    layers: tuple[Any, ...] = ("embed", 0, 0, 1, 1, 1)
    nodes = tuple(Node(name=str(index), layer=layer, op=add, inputs=("tokens",)) for index, layer in enumerate(layers))
    result = estimate(OpGraph(nodes=nodes), Distinct())
    assert [layer for layer, _ in result.by_layer] == ["embed", 0, 1]
    assert [node.name for node, _ in result.by_op] == [node.name for node in nodes]
    assert (result.protocol, result.network, result.latency_s_range) == ("distinct", "lan", None)
    names = [field.name for field in fields(Price)]
    for price, num_ops in [(result.total, 6), *zip((price for _, price in result.by_layer), (1, 2, 3), strict=True)]:
        assert asdict(price) == {name: num_ops * 10**digit for digit, name in enumerate(names)}
    total = total_document(result)
    for part in (total, price_numbers(result.by_layer[0][1]), *op_records(result)):
        assert set(names) <= set(part)
    assert {name: total[name] for name in names} == asdict(result.total)


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
