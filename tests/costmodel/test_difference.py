import pytest

from costmodel import ops
from costmodel.difference import changes
from costmodel.estimate import estimate
from costmodel.protocols import load_pricer


def priced(graph_of, name, protocol="published", **dimensions):
    return estimate(graph_of(name, **dimensions), load_pricer(protocol))


@pytest.mark.parametrize(("name", "other"), [("SM+LN+G", "SM+ScFuFFN_i6"), ("SM_i12", "SM+LN+R"), ("SM", "SM+LN")])
def test_changes_are_the_difference_of_the_totals(graph_of, name, other):
    before, after = priced(graph_of, name), priced(graph_of, other)
    differences = changes(before, after)
    assert sum(change.latency_s for change in differences) == after.total.latency_s - before.total.latency_s
    assert sum(change.sent_bytes for change in differences) == after.total.sent_bytes - before.total.sent_bytes
    assert [change.latency_s for change in differences] == sorted(change.latency_s for change in differences)


def test_what_an_activation_costs(graph_of):
    before, after = priced(graph_of, "SM+LN+G"), priced(graph_of, "SM+LN+R")
    assert changes(before, before) == ()
    gelu, relu = changes(before, after)
    assert (type(gelu.op), gelu.num_before, gelu.num_after) == (ops.Gelu, 12, 0)
    assert (type(relu.op), relu.num_before, relu.num_after) == (ops.Relu, 0, 12)
    assert gelu.latency_s < 0 < relu.latency_s


def test_equal_ops_at_other_prices_differ(graph_of):
    before, after = (priced(graph_of, "SM", protocol, base="tiny", seq_len=8) for protocol in ("semi2k", "aby3"))
    changes_by_op = {type(change.op).__name__: change for change in changes(before, after)}
    assert (changes_by_op["Softmax"].num_before, changes_by_op["Softmax"].num_after) == (2, 2)
    assert changes_by_op["Softmax"].sent_bytes
