"""Curves and bars are the prices of `estimate`, whatever way they are put together."""

from dataclasses import replace
from typing import Literal

import pytest
from matplotlib import pyplot as plt

from costmodel.estimate import estimate
from costmodel.network import NETWORKS, Network
from costmodel.protocols import derived, load_pricer
from nas.report.cost_figures import (
    MOST_BASELINES,
    MOST_MEMBERS,
    OTHER,
    Stack,
    breakdown_figure,
    chosen,
    sensitivity_figure,
)
from nas.report.draw import draw_breakdown, draw_sensitivity
from search_spaces.architecture import arch_id
from search_spaces.bases import BASES
from search_spaces.lower import lower
from search_spaces.notation import parse, placement
from search_spaces.workload import Workload

BASE = BASES["tiny"]
ARCHITECTURES = {name: parse(name, BASE).architecture for name in ("SM+LN+G", "SM+ScFuFFN", "SM(t)+R")}


@pytest.mark.parametrize("protocol", ["semi2k", "aby3"])
@pytest.mark.parametrize("duplex", ["full", "half"])
def test_curves_are_estimates_at_each_network(protocol: str, duplex: Literal["full", "half"]) -> None:
    pricer = replace(derived.load(protocol, "wan"), link=replace(NETWORKS["wan"], duplex=duplex))
    data = sensitivity_figure(ARCHITECTURES, pricer, Workload(prompt_len=16))
    assert (data.bandwidth_bits_per_s, data.rtt_s) == (352e6, 0.04)
    for curve, along_rtt in zip(data.by_bandwidth, data.by_rtt, strict=True):
        graph = lower(ARCHITECTURES[curve.name], 16)
        for index in (0, 20, 40):
            at = Network(
                name="x", bandwidth_bits_per_s=data.bandwidths[index], rtt_s=data.rtt_s, duplex=duplex, source="test"
            )
            whole = estimate(graph, replace(pricer, link=at)).total.latency_s
            assert curve.latency_s[index] == pytest.approx(whole, rel=1e-6)
            at = replace(at, bandwidth_bits_per_s=352e6, rtt_s=data.rtts_s[index])
            whole = estimate(graph, replace(pricer, link=at)).total.latency_s
            assert along_rtt.latency_s[index] == pytest.approx(whole, rel=1e-6)
        assert list(curve.latency_s) == sorted(curve.latency_s, reverse=True)
        assert list(along_rtt.latency_s) == sorted(along_rtt.latency_s)


def test_on_loopback_only_the_other_axis_costs() -> None:
    """Infinite bandwidth and no RTT are settings as good as others, though no axis shows them."""
    data = sensitivity_figure(ARCHITECTURES, derived.load("semi2k", "loopback"), Workload(prompt_len=16))
    computing = estimate(lower(ARCHITECTURES["SM+LN+G"], 16), load_pricer("semi2k", "loopback")).total.latency_s
    assert data.by_bandwidth[0].latency_s[0] > data.by_bandwidth[0].latency_s[-1] > computing
    assert data.by_rtt[0].latency_s[0] > computing


def column(stack: Stack, index: int) -> dict[str, float]:
    return {part: values[index] for part, values in zip(stack.parts, stack.values, strict=True)}


@pytest.mark.parametrize("protocol", ["published", "semi2k"])
def test_bars_add_up_to_the_estimate(protocol: str) -> None:
    pricer = load_pricer(protocol)
    data = breakdown_figure(ARCHITECTURES, pricer, Workload(prompt_len=16))
    assert data.names == tuple(ARCHITECTURES)
    for index, architecture in enumerate(ARCHITECTURES.values()):
        priced = estimate(lower(architecture, 16), pricer)
        for stack in (data.latency_by_kind, data.latency_by_layer):
            assert sum(column(stack, index).values()) == pytest.approx(priced.total.latency_s)
        for stack in (data.bytes_by_kind, data.bytes_by_layer):
            assert sum(column(stack, index).values()) == pytest.approx(priced.total.sent_bytes)
        layers = {str(layer): price.latency_s for layer, price in priced.by_layer}
        assert column(data.latency_by_layer, index) == pytest.approx(layers)
        linear = sum(price.sent_bytes for node, price in priced.by_op if node.op.label == "linear")
        assert column(data.bytes_by_kind, index)["linear"] == pytest.approx(linear)


def test_layers_are_in_order_and_small_kinds_together() -> None:
    data = breakdown_figure(ARCHITECTURES, load_pricer("semi2k"), Workload(prompt_len=16))
    assert data.latency_by_layer.parts == ("embed", "0", "1", "head")
    assert data.bytes_by_kind.parts[-1] == OTHER  # learned positions are free in bytes
    assert "embedding" in data.latency_by_kind.parts


def test_captions_say_whom_prices_trust_and_what_is_extrapolated() -> None:
    dealt = sensitivity_figure(ARCHITECTURES, derived.load("semi2k", "lan"), Workload(prompt_len=16)).title
    assert dealt.startswith("protocol semi2k (2 parties, semi-honest, dishonest majority, trusted dealer), T=16")
    assert dealt.endswith("set-up included but for what a dealer makes")
    shared = sensitivity_figure(ARCHITECTURES, derived.load("aby3", "lan"), Workload(prompt_len=16)).title
    assert shared.endswith("set-up included")
    title = breakdown_figure(ARCHITECTURES, load_pricer("published"), Workload(prompt_len=16)).title
    assert "(2 parties, semi-honest, dishonest majority), T=16; extrapolated: d_model 16 (data: 768), d_ff 64" in title


def test_chosen_are_both_ends_of_the_front_and_few_baselines(make_record) -> None:
    def record(index: int, name: str, **changes):
        architecture = parse(name, BASE).architecture
        typed = placement(architecture)
        return make_record(index, notation=name, placement=typed, arch_id=arch_id(architecture), **changes)

    front = [
        record(index, name)
        for index, name in enumerate(["SM_i2", "SM_i1", "SM", "SM(t)", "SM+R", "SM+LR", "EReg(SM+G)", "SM+G"])
    ]
    baselines = [record(index, name) for index, name in enumerate(["SM+LN+G", "SM+LN+R", "SM+LN"], 10)]
    found = chosen(front, baselines, BASE)
    assert len(found) == MOST_MEMBERS + MOST_BASELINES
    assert (next(iter(found)), list(found)[MOST_MEMBERS - 1]) == ("SM_i2", "SM+G")
    assert list(found)[MOST_MEMBERS:] == ["SM+LN+G", "SM+LN+R"]
    assert list(chosen(front[:1], [], BASE)) == ["SM_i2"]
    assert chosen([], [], BASE) == {}


def test_any_figure_can_be_drawn() -> None:
    """One bar, one curve, and a setting that no axis shows."""
    one = {"SM+LN+G": ARCHITECTURES["SM+LN+G"]}
    pricer = derived.load("semi2k", "loopback")
    for figure in (
        draw_breakdown(breakdown_figure(one, pricer, Workload(prompt_len=1))),
        draw_sensitivity(sensitivity_figure(one, pricer, Workload(prompt_len=1))),
    ):
        figure.canvas.draw()
        plt.close(figure)
