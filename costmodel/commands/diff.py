"""`python -m costmodel diff`."""

import json
from typing import Any, Literal

from costmodel.commands.architectures import asked_model
from costmodel.commands.output import print_blocks, print_csv
from costmodel.difference.break_even import BreakEven, break_even, network_use
from costmodel.difference.by_op import changes
from costmodel.estimate import Pricer
from costmodel.estimate import estimate as price_graph
from costmodel.network import link
from costmodel.ops import OpGraph
from costmodel.protocols import load_pricer
from costmodel.protocols.derived import Derived
from costmodel.protocols.primitives import EngineSetting, Holder
from costmodel.report import differences


def diff(
    a: str,
    b: str,
    protocol: str = "published",
    versus: str | None = None,
    network: str | None = None,
    bandwidth: str | None = None,
    rtt: str | None = None,
    weights: Holder | None = None,
    format: Literal["table", "json", "csv"] = "table",
    **model: Any,
) -> None:
    """Say what makes B cheaper than A, op by op, and on which network they break even.

    The same architecture twice, with --versus, compares two protocols.

    Args:
        a: an architecture, as `estimate` takes it.
        b: another one.
        protocol: published, semi2k, aby3 or cheetah.
        versus: the protocol of B, if it is another one.
        network: a named network or a .yaml file, as `estimate` takes it.
        bandwidth: of the link, with a unit, such as 1Gbps, instead of the network's.
        rtt: of the link, with a unit, such as 4ms, instead of the network's.
        weights: secret-shared (the default), or held by the server alone.
        format: tables for people, one JSON document, or CSV, a line an op; in SI units.
    """
    asked, setting = link(network, bandwidth, rtt), None if weights is None else EngineSetting(weights=weights)
    (first, graph, *_), (second, other, *_) = (asked_model(arch, **model) for arch in (a, b))
    pricers = tuple(load_pricer(name, asked, None, setting) for name in (protocol, versus or protocol))
    names = (first["architecture"], second["architecture"])
    priced = (price_graph(graph, pricers[0]), price_graph(other, pricers[1]))
    found, even = changes(*priced), _break_even((graph, other), pricers)
    if format == "json":
        print(json.dumps(differences.document(names, priced, found, even, seq_len=first["seq_len"]), allow_nan=False))
    elif format == "csv":
        print_csv([differences.change_record(change) for change in found])
    else:
        told = [] if even is None else differences.break_even_lines(even)
        lines = [*differences.summary(names, priced, seq_len=first["seq_len"]), *told]
        print_blocks(lines, [differences.changes_table(found)])


def _break_even(graphs: tuple[OpGraph, OpGraph], pricers: tuple[Pricer, ...]) -> BreakEven | None:
    """None where a network is fitted in."""
    first, second = pricers
    if not (isinstance(first, Derived) and isinstance(second, Derived)):
        return None
    return break_even(
        network_use(graphs[0], first),
        network_use(graphs[1], second),
        at_bandwidth_bits_per_s=first.link.bandwidth_bits_per_s,
        at_rtt_s=first.link.rtt_s,
    )
