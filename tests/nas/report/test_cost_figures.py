"""Curves and bars are the prices of `estimate`, whatever way they are put together."""

from dataclasses import replace
from typing import Literal

import pytest
from matplotlib import pyplot as plt

from costmodel.estimate import Pricer, estimate
from costmodel.network import NETWORKS, Network
from costmodel.ops import OpGraph
from costmodel.protocols import derived, load_pricer
from nas.report.cost_figures import (
    MOST_BASELINES,
    MOST_MEMBERS,
    breakdown_figure,
    chosen,
    sensitivity_figure,
)
from nas.report.draw import draw_panels
from nas.report.panels import OTHER, BarPanel
from search_spaces.architecture import Architecture, arch_id
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
    bandwidths, rtts = sensitivity_figure(ARCHITECTURES, pricer, Workload(prompt_len=16)).panels
    assert "round-trip time of 40 ms" in bandwidths.x_label
    assert "bandwidth of 352 Mbit/s" in rtts.x_label
    for curve, along_rtt in zip(bandwidths.series, rtts.series, strict=True):
        graph = lower(ARCHITECTURES[curve.name], 16)
        for index in (0, 20, 40):
            at = Network(name="x", bandwidth_bits_per_s=curve.x[index] * 1e6, rtt_s=0.04, duplex=duplex, source="test")
            assert curve.y[index] == pytest.approx(seconds(graph, replace(pricer, link=at)), rel=1e-6)
            at = replace(at, bandwidth_bits_per_s=352e6, rtt_s=along_rtt.x[index] / 1e3)
            assert along_rtt.y[index] == pytest.approx(seconds(graph, replace(pricer, link=at)), rel=1e-6)
        assert list(curve.y) == sorted(curve.y, reverse=True)
        assert list(along_rtt.y) == sorted(along_rtt.y)


def seconds(graph: OpGraph, pricer: Pricer) -> float:
    return estimate(graph, pricer).total.latency_s


def test_on_loopback_only_the_other_axis_costs() -> None:
    """Infinite bandwidth and no RTT are settings as good as others, though no axis shows them."""
    pricer = derived.load("semi2k", "loopback")
    bandwidths, rtts = sensitivity_figure(ARCHITECTURES, pricer, Workload(prompt_len=16)).panels
    computing = seconds(lower(ARCHITECTURES["SM+LN+G"], 16), pricer)
    assert bandwidths.series[0].y[0] > bandwidths.series[0].y[-1] > computing
    assert rtts.series[0].y[0] > computing


def bar_panels(pricer: Pricer, architectures: dict[str, Architecture] = ARCHITECTURES) -> list[BarPanel]:
    panels = breakdown_figure(architectures, pricer, Workload(prompt_len=16)).panels
    return [panel for panel in panels if isinstance(panel, BarPanel)]


@pytest.mark.parametrize("protocol", ["published", "semi2k"])
def test_bars_add_up_to_the_estimate(protocol: str) -> None:
    pricer = load_pricer(protocol)
    panels = bar_panels(pricer)
    assert all(panel.groups == tuple(ARCHITECTURES) for panel in panels)
    for index, architecture in enumerate(ARCHITECTURES.values()):
        priced = estimate(lower(architecture, 16), pricer)
        by_kind_s, by_layer_s, by_kind, by_layer = (
            {part: values[index] for part, values in panel.series} for panel in panels
        )
        for bar in (by_kind_s, by_layer_s):
            assert sum(bar.values()) == pytest.approx(priced.total.latency_s)
        for bar in (by_kind, by_layer):
            assert sum(bar.values()) == pytest.approx(priced.total.sent_bytes / 1e9)
        assert by_layer_s == pytest.approx({str(layer): price.latency_s for layer, price in priced.by_layer})
        linear = sum(price.sent_bytes for node, price in priced.by_op if node.op.label == "linear")
        assert by_kind["linear"] == pytest.approx(linear / 1e9)


def test_layers_are_in_order_and_small_kinds_together() -> None:
    shallow = {"shallow": parse("1xoSoRo-1xooooo", BASE).architecture}  # whose head follows its one layer
    panels = bar_panels(load_pricer("semi2k"), shallow | ARCHITECTURES)
    by_kind_s, by_layer_s, by_kind, _ = ([part for part, _ in panel.series] for panel in panels)
    assert by_layer_s == ["embed", "0", "1", "head"]
    assert by_kind[-1] == OTHER  # learned positions are free in bytes
    assert "embedding" in by_kind_s


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
    selection = chosen(front, baselines, BASE)
    assert len(selection) == MOST_MEMBERS + MOST_BASELINES
    assert (next(iter(selection)), list(selection)[MOST_MEMBERS - 1]) == ("SM_i2", "SM+G")
    assert list(selection)[MOST_MEMBERS:] == ["SM+LN+G", "SM+LN+R"]
    assert list(chosen(front[:1], [], BASE)) == ["SM_i2"]
    assert chosen([], [], BASE) == {}


def test_any_figure_can_be_drawn() -> None:
    """One bar, one curve, and a setting that no axis shows."""
    architectures = {"SM+LN+G": ARCHITECTURES["SM+LN+G"]}
    pricer = derived.load("semi2k", "loopback")
    for data in (
        breakdown_figure(architectures, pricer, Workload(prompt_len=1)),
        sensitivity_figure(architectures, pricer, Workload(prompt_len=1)),
    ):
        figure = draw_panels(data)
        figure.canvas.draw()
        plt.close(figure)
