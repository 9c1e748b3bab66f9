import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from costmodel import ops
from costmodel.difference import NetworkUse, break_even, changes, network_use
from costmodel.estimate import estimate
from costmodel.network import NETWORKS
from costmodel.protocols import derived, load_pricer
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS

AMOUNT = st.floats(0.0, 1e6)
USES = st.builds(NetworkUse, compute_s=AMOUNT, waited_bits=AMOUNT.map(lambda value: value * 1e6), rounds=AMOUNT)


def test_written_out():
    # 10 s and 8e9 bits in 1,000 rounds against 20 s and 1e9 bits in 3,000
    first = NetworkUse(compute_s=10.0, waited_bits=8e9, rounds=1000)
    second = NetworkUse(compute_s=20.0, waited_bits=1e9, rounds=3000)
    crossing = break_even(first, second, at_bandwidth_bits_per_s=1e8, at_rtt_s=0.01)
    # at 10 ms: 7e9 / x = 10 + 2,000 * 0.005 = 20, so x = 350 Mbit/s; at 100 Mbit/s: 70 = 10 + 1,000 x, so x = 60 ms
    assert crossing.bandwidth_bits_per_s == pytest.approx(350e6)
    assert crossing.rtt_s == pytest.approx(0.06)
    assert (crossing.faster_below_bandwidth, crossing.faster_below_rtt) == ("second", "second")


def test_one_may_be_faster_everywhere():
    first = NetworkUse(compute_s=1.0, waited_bits=1e6, rounds=10)
    second = NetworkUse(compute_s=2.0, waited_bits=2e6, rounds=20)
    crossing = break_even(first, second, at_bandwidth_bits_per_s=math.inf, at_rtt_s=0.0)
    assert (crossing.bandwidth_bits_per_s, crossing.rtt_s) == (None, None)
    assert (crossing.faster_below_bandwidth, crossing.faster_below_rtt) == ("first", "first")
    same = break_even(first, first, at_bandwidth_bits_per_s=1e9, at_rtt_s=0.0)
    assert (same.bandwidth_bits_per_s, same.faster_below_bandwidth, same.faster_below_rtt) == (None, "equal", "equal")


@given(first=USES, second=USES, bandwidth=st.floats(1e6, 1e11), rtt_s=st.floats(0.0, 1.0))
def test_latencies_are_equal_there_and_cross(first, second, bandwidth, rtt_s):
    crossing = break_even(first, second, at_bandwidth_bits_per_s=bandwidth, at_rtt_s=rtt_s)
    if (at := crossing.bandwidth_bits_per_s) is not None:
        assume(1e-3 < at < 1e15)
        assert first.latency_s(at, rtt_s) == pytest.approx(second.latency_s(at, rtt_s), rel=1e-6, abs=1e-6)
        lower, other = (second, first) if crossing.faster_below_bandwidth == "second" else (first, second)
        assert lower.latency_s(at / 4, rtt_s) <= other.latency_s(at / 4, rtt_s) * (1 + 1e-9)
        assert lower.latency_s(at * 4, rtt_s) >= other.latency_s(at * 4, rtt_s) * (1 - 1e-9)
    if (delay := crossing.rtt_s) is not None:
        assume(delay < 1e9)
        assert first.latency_s(bandwidth, delay) == pytest.approx(
            second.latency_s(bandwidth, delay), rel=1e-6, abs=1e-6
        )


@pytest.mark.parametrize("protocol", ENGINE_PROTOCOLS)
@pytest.mark.parametrize("duplex", ["full", "half"])
def test_a_model_takes_on_a_link_what_its_parts_say(protocol, duplex, graph_of):
    graph = graph_of("SM+LN+R", base="tiny", seq_len=8)
    wan = replace(NETWORKS["wan"], duplex=duplex)
    pricer = derived.load(protocol, wan)
    use = network_use(graph, pricer)
    latency_s = estimate(graph, pricer).total.latency_s
    assert use.latency_s(wan.bandwidth_bits_per_s, wan.rtt_s) == pytest.approx(latency_s, rel=1e-5)


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
