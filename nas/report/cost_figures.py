"""Data of the cost figures: what networks do to latency, and where latency and bytes come from. No drawing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from costmodel.cost import Price, shared_price, total_price
from costmodel.data_range import describe
from costmodel.estimate import Pricer
from costmodel.network import NETWORKS
from costmodel.ops import Node
from costmodel.protocols.derived import Derived
from costmodel.trust import caption
from nas.report.front_figures import LONGEST_NAME
from nas.run.ledger import Record, deployed_of
from search_spaces.architecture import Architecture, arch_id
from search_spaces.notation import name_of
from search_spaces.workload import Workload

MOST_MEMBERS, MOST_BASELINES = 5, 2  # more curves than seven cannot be told apart
PROBE_BITS_PER_S = 1e6  # any finite bandwidth tells how many bits are waited for
BANDWIDTHS_BITS_PER_S = tuple(float(value) for value in np.geomspace(1e7, 1e11, 41))
RTTS_S = tuple(float(value) for value in np.geomspace(1e-5, 1.0, 51))
SMALL_SHARE = 0.01  # kinds of op below this share of every bar are drawn together

OTHER = "other"


class Curve(NamedTuple):
    """The latency of one architecture at every value of an axis, in seconds."""

    name: str
    latency_s: tuple[float, ...]


class SensitivityFigure(NamedTuple):
    """Latency against each property of the network, the other one kept. presets: (name, bandwidth, RTT)."""

    title: str
    bandwidth_bits_per_s: float
    rtt_s: float
    bandwidths: tuple[float, ...]
    by_bandwidth: tuple[Curve, ...]
    rtts_s: tuple[float, ...]
    by_rtt: tuple[Curve, ...]
    presets: tuple[tuple[str, float, float], ...]


class Stack(NamedTuple):
    """One measure of all architectures: parts x architectures, in the order of the figure's names."""

    title: str
    parts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


class BreakdownFigure(NamedTuple):
    """Latency (s) and bytes of each architecture, by kind of op and by layer."""

    title: str
    names: tuple[str, ...]
    latency_by_kind: Stack
    latency_by_layer: Stack
    bytes_by_kind: Stack
    bytes_by_layer: Stack


def chosen(members: Sequence[Record], baselines: Iterable[Record], base: Architecture) -> dict[str, Architecture]:
    """Architectures to draw, by label: both ends of a front, members evenly between, the first baselines.

    Recipes have no price, so `EReg(X)` and X are one.
    """
    front = list({record.deployed_id or record.arch_id: record for record in members}.values())
    places = np.linspace(0, len(front) - 1, min(len(front), MOST_MEMBERS)).round().astype(int)
    others = list({record.arch_id: record for record in baselines}.values())[:MOST_BASELINES]
    architectures = [deployed_of(record, base) for record in [*(front[place] for place in places), *others]]
    return {_label(architecture): architecture for architecture in architectures}


def sensitivity_figure(
    architectures: dict[str, Architecture], pricer: Derived, workload: Workload
) -> SensitivityFigure:
    """Latency of each architecture against bandwidth and against RTT."""
    probe = replace(pricer.link, bandwidth_bits_per_s=PROBE_BITS_PER_S, rtt_s=0.0)
    price = cache(replace(pricer, link=probe).price)
    wholes = {
        name: total_price(price(node.op) for graph in workload.graphs(form) for node in graph)
        for name, form in architectures.items()
    }
    parts = {name: shared_price(whole, workload.new_tokens) for name, whole in wholes.items()}
    bandwidth, rtt_s = pricer.link.bandwidth_bits_per_s, pricer.link.rtt_s
    return SensitivityFigure(
        title=f"protocol {pricer.protocol} ({caption(pricer.trust)}), {workload.words}, {pricer.link.duplex} duplex; "
        f"set-up included{' but for what a dealer makes' if pricer.trust.dealer else ''}",
        bandwidth_bits_per_s=bandwidth,
        rtt_s=rtt_s,
        bandwidths=BANDWIDTHS_BITS_PER_S,
        by_bandwidth=_curves(parts, [(value, rtt_s) for value in BANDWIDTHS_BITS_PER_S]),
        rtts_s=RTTS_S,
        by_rtt=_curves(parts, [(bandwidth, value) for value in RTTS_S]),
        presets=tuple((link.name, link.bandwidth_bits_per_s, link.rtt_s) for link in NETWORKS.values()),
    )


def breakdown_figure(architectures: dict[str, Architecture], pricer: Pricer, workload: Workload) -> BreakdownFigure:
    """Where the latency and the bytes of each architecture come from."""
    runs = [workload.graphs(form) for form in architectures.values()]
    share = cache(lambda op: shared_price(pricer.price(op), workload.new_tokens))
    priced = [[(node, share(node.op)) for graph in graphs for node in graph] for graphs in runs]
    network = f" on {pricer.network}" if pricer.network else ""
    beyond = [text for graphs in runs for graph in graphs for text in pricer.extrapolated(graph)]
    outside = describe(dict.fromkeys(beyond))

    def stacked(title: str, measure: str, part: Callable[[Node], str], *, joined: bool) -> Stack:
        stack = _stack(title, priced, measure, part)
        return _small_joined(stack) if joined else stack

    return BreakdownFigure(
        title=f"protocol {pricer.protocol} ({caption(pricer.trust)}){network}, {workload.words}"
        f"{outside and f'; {outside}'}",
        names=tuple(architectures),
        latency_by_kind=stacked("latency by kind of op", "latency_s", kind_of, joined=True),
        latency_by_layer=stacked("latency by layer", "latency_s", _layer, joined=False),
        bytes_by_kind=stacked("communication by kind of op", "sent_bytes", kind_of, joined=True),
        bytes_by_layer=stacked("communication by layer", "sent_bytes", _layer, joined=False),
    )


def _stack(
    title: str, priced: Sequence[Sequence[tuple[Node, Price]]], measure: str, part: Callable[[Node], str]
) -> Stack:
    sums = [dict[str, float]() for _ in priced]
    for nodes, known in zip(priced, sums, strict=True):
        for node, price in nodes:
            known[part(node)] = known.get(part(node), 0.0) + getattr(price, measure)
    names = dict.fromkeys(name for known in sums for name in known)
    return Stack(
        title=title,
        parts=tuple(names),
        values=tuple(tuple(known.get(name, 0.0) for known in sums) for name in names),
    )


def _small_joined(stack: Stack) -> Stack:
    """The parts that are small in every bar as one, at the end; the rest largest first."""
    values = np.array(stack.values)
    largest = (values / np.maximum(values.sum(axis=0), 1e-300)).max(axis=1)
    kept = [row for row in np.argsort(-largest, kind="stable") if largest[row] >= SMALL_SHARE]
    rest = values.sum(axis=0) - values[kept].sum(axis=0)
    return Stack(
        title=stack.title,
        parts=(*(stack.parts[row] for row in kept), *([OTHER] if len(kept) < len(stack.parts) else [])),
        values=(
            *(stack.values[row] for row in kept),
            *([tuple(rest.tolist())] if len(kept) < len(stack.parts) else []),
        ),
    )


def _curves(parts: dict[str, Price], links: Sequence[tuple[float, float]]) -> tuple[Curve, ...]:
    """Latency at each (bandwidth, RTT), from prices on the probe."""
    return tuple(
        Curve(name=name, latency_s=tuple(_latency_s(price, *link) for link in links)) for name, price in parts.items()
    )


def _latency_s(price: Price, bandwidth_bits_per_s: float, rtt_s: float) -> float:
    assert price.compute_s is not None
    assert price.network_s is not None
    assert price.rounds is not None
    wire_s = price.network_s * PROBE_BITS_PER_S / bandwidth_bits_per_s
    return price.compute_s + wire_s + price.rounds * rtt_s / 2


def kind_of(node: Node) -> str:
    """The name of an op in figures."""
    return node.op.label or type(node.op).__name__


def _layer(node: Node) -> str:
    return str(node.layer)


def _label(architecture: Architecture) -> str:
    name = name_of(architecture)
    return name if len(name) <= LONGEST_NAME else arch_id(architecture)
