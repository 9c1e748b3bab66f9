"""Data of the cost figures: what networks do to latency, and where latency and bytes come from. No drawing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from costmodel.cost import Price, shared_price, total_price
from costmodel.estimate import Pricer, outside_data
from costmodel.network import NETWORKS, Network
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.derived import Derived
from costmodel.trust import caption
from nas.report.front_figures import LONGEST_NAME
from nas.report.panels import OTHER, BarPanel, LinePanel, PanelFigure, Series
from nas.run.ledger import Record, deployed_of
from search_spaces.architecture import Architecture, arch_id
from search_spaces.notation import name_of
from search_spaces.workload import Workload

MOST_MEMBERS, MOST_BASELINES = 5, 2  # more curves than seven cannot be told apart
PROBE_BITS_PER_S = 1e6  # any finite bandwidth tells how many bits are waited for
BANDWIDTHS_BITS_PER_S = tuple(float(value) for value in np.geomspace(1e7, 1e11, 41))
RTTS_S = tuple(float(value) for value in np.geomspace(1e-5, 1.0, 51))
SMALL_SHARE = 0.01  # kinds of op below this share of every bar are drawn together


def chosen(members: Sequence[Record], baselines: Iterable[Record], base: Architecture) -> dict[str, Architecture]:
    """Architectures to draw, by label: both ends of a front, members evenly between, the first baselines.

    Recipes have no price, so `EReg(X)` and X are one.
    """
    front = list({record.deployed_id or record.arch_id: record for record in members}.values())
    places = np.linspace(0, len(front) - 1, min(len(front), MOST_MEMBERS)).round().astype(int)
    others = list({record.arch_id: record for record in baselines}.values())[:MOST_BASELINES]
    architectures = [deployed_of(record, base) for record in [*(front[place] for place in places), *others]]
    return {_label(architecture): architecture for architecture in architectures}


def sensitivity_figure(architectures: dict[str, Architecture], pricer: Derived, workload: Workload) -> PanelFigure:
    """Latency of each architecture against bandwidth and against RTT, the other one kept; presets are marked."""
    price = cache(replace(pricer, link=replace(pricer.link, bandwidth_bits_per_s=PROBE_BITS_PER_S, rtt_s=0.0)).price)
    probed = [
        (name, shared_price(total_price(by_part(workload.graphs(form), price, kind_of).values()), workload.new_tokens))
        for name, form in architectures.items()
    ]

    def panel(x_label: str, property: str, unit: float, values: Sequence[float]) -> LinePanel:
        links = [replace(pricer.link, **{property: value}) for value in values]  # type: ignore[arg-type]
        axis = tuple(value / unit for value in values)
        return LinePanel(
            title="",
            x_label=x_label,
            y_label="predicted latency per token (seconds)",
            series=tuple(
                Series(name, axis, tuple(_latency_s(whole, link) for link in links)) for name, whole in probed
            ),
            log_x=10,
            log_y=True,
            marks=tuple((link.name, getattr(link, property) / unit) for link in NETWORKS.values()),
        )

    bandwidth, rtt_s = pricer.link.bandwidth_bits_per_s / 1e6, pricer.link.rtt_s * 1e3
    bandwidth_label = f"bandwidth (Mbit/s), at a round-trip time of {rtt_s:g} ms"
    rtt_label = f"round-trip time (ms), at a bandwidth of {bandwidth:g} Mbit/s"
    return PanelFigure(
        title=f"protocol {pricer.protocol} ({caption(pricer.trust)}), {workload.words}, {pricer.link.duplex} duplex; "
        f"set-up included{' but for what a dealer makes' if pricer.trust.dealer else ''}",
        panels=(
            panel(bandwidth_label, "bandwidth_bits_per_s", 1e6, BANDWIDTHS_BITS_PER_S),
            panel(rtt_label, "rtt_s", 1e-3, RTTS_S)._replace(y_label=""),
        ),
        row_height=4.7,
        share_y=True,
    )


def breakdown_figure(architectures: dict[str, Architecture], pricer: Pricer, workload: Workload) -> PanelFigure:
    """Where the latency and the bytes of each architecture come from: kinds of op beside layers."""
    runs = [workload.graphs(form) for form in architectures.values()]
    price = cache(lambda op: shared_price(pricer.price(op), workload.new_tokens))
    by_kind = [by_part(graphs, price, kind_of) for graphs in runs]
    by_layer = [by_part(graphs, price, lambda node: str(node.layer)) for graphs in runs]
    longest_s = max(total_price(prices.values()).latency_s for prices in by_kind)
    time = ("minutes", 60.0) if longest_s >= 120 else ("seconds", 1.0)
    network = f" on {pricer.network}" if pricer.network else ""
    outside = outside_data(pricer, (graph for graphs in runs for graph in graphs))
    return PanelFigure(
        title=f"protocol {pricer.protocol} ({caption(pricer.trust)}){network}, {workload.words}"
        f"{outside and f'; {outside}'}",
        panels=tuple(
            BarPanel(
                title=f"{said} by {part}",
                x_label=unit,
                groups=tuple(architectures),
                series=_stacked(prices, measure, scale, small_joined=not named),
                stacked=True,
                named=named,
            )
            for said, measure, (unit, scale) in (
                ("latency", "latency_s", time),
                ("communication", "sent_bytes", ("GB", 1e9)),
            )
            for part, prices, named in (("kind of op", by_kind, False), ("layer", by_layer, True))
        ),
        columns=2,
        row_height=1.1 + 0.4 * len(architectures),
        share_y=True,
    )


def by_part(graphs: Iterable[OpGraph], price: Callable[[Op], Price], part: Callable[[Node], str]) -> dict[str, Price]:
    """The price of each part of some op graphs, in the order in which they come."""
    prices: dict[str, list[Price]] = {}
    for graph in graphs:
        for node in graph:
            prices.setdefault(part(node), []).append(price(node.op))
    return {name: total_price(those) for name, those in prices.items()}


def kind_of(node: Node) -> str:
    """The name of an op in figures."""
    return node.op.label or type(node.op).__name__


def _stacked(
    bars: Sequence[dict[str, Price]], measure: str, unit: float, *, small_joined: bool
) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Parts with a value a bar, in the order of the bar with most; or those that are small in every bar as one, at the
    end, and the rest largest first.
    """
    names = list(dict.fromkeys(name for bar in sorted(bars, key=len, reverse=True) for name in bar))
    values = np.array([[getattr(bar[name], measure) / unit if name in bar else 0.0 for bar in bars] for name in names])
    kept, rest = list(range(len(names))), []
    if small_joined:
        largest = (values / np.maximum(values.sum(axis=0), 1e-300)).max(axis=1)
        kept = [row for row in np.argsort(-largest, kind="stable") if largest[row] >= SMALL_SHARE]
        rest = [(OTHER, values.sum(axis=0) - values[kept].sum(axis=0))] if len(kept) < len(names) else []
    return tuple((name, tuple(row.tolist())) for name, row in [*((names[at], values[at]) for at in kept), *rest])


def _latency_s(price: Price, link: Network) -> float:
    """Latency on a link, from the price on the probe."""
    assert price.compute_s is not None
    assert price.network_s is not None
    assert price.rounds is not None
    wire_s = price.network_s * PROBE_BITS_PER_S / link.bandwidth_bits_per_s
    return price.compute_s + wire_s + price.rounds * link.rtt_s / 2


def _label(architecture: Architecture) -> str:
    name = name_of(architecture)
    return name if len(name) <= LONGEST_NAME else arch_id(architecture)
