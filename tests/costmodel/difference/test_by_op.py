import pytest

from costmodel import ops
from costmodel.difference.by_op import changes
from costmodel.estimate import estimate
from costmodel.protocols import load_pricer


def priced(graph_of, name, protocol="published", **dimensions):
    return estimate(graph_of(name, **dimensions), load_pricer(protocol))


@pytest.mark.parametrize(("one", "other"), [("SM+LN+G", "SM+ScFuFFN_i6"), ("SM_i12", "SM+LN+R"), ("SM", "SM+LN")])
def test_changes_are_the_difference_of_the_totals(graph_of, one, other):
    before, after = priced(graph_of, one), priced(graph_of, other)
    found = changes(before, after)
    assert sum(change.latency_s for change in found) == after.total.latency_s - before.total.latency_s
    assert sum(change.sent_bytes for change in found) == after.total.sent_bytes - before.total.sent_bytes
    assert [change.latency_s for change in found] == sorted(change.latency_s for change in found)


def test_what_an_activation_costs(graph_of):
    gelu, relu = changes(priced(graph_of, "SM+LN+G"), priced(graph_of, "SM+LN+R"))
    assert (type(gelu.op), gelu.num_before, gelu.num_after) == (ops.Gelu, 12, 0)
    assert (type(relu.op), relu.num_before, relu.num_after) == (ops.Relu, 0, 12)
    assert gelu.latency_s < 0 < relu.latency_s


def test_nothing_differs_from_itself(graph_of):
    one = priced(graph_of, "SM+LN+G")
    assert changes(one, one) == ()


def test_equal_ops_at_other_prices_differ(graph_of):
    one, other = (priced(graph_of, "SM", protocol, base="tiny", seq_len=8) for protocol in ("semi2k", "aby3"))
    found = {type(change.op).__name__: change for change in changes(one, other)}
    assert (found["Softmax"].num_before, found["Softmax"].num_after) == (2, 2)
    assert found["Softmax"].sent_bytes
