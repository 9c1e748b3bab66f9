"""`python -m costmodel diff`."""

import json
from typing import Any, Literal

from costmodel.commands.output import print_blocks, print_csv
from costmodel.difference.break_even import BreakEven, break_even, network_use
from costmodel.difference.by_op import changes
from costmodel.pricing.asked import asked_model
from costmodel.pricing.price import price
from costmodel.pricing.priced import PricedModel
from costmodel.protocols.derived import Derived
from costmodel.protocols.primitives import Holder
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
    asked = (asked_model(a, **model), asked_model(b, **model))
    on: dict[str, Any] = {"network": network, "bandwidth": bandwidth, "rtt": rtt, "weights": weights}
    first, second = price(asked[0], protocol=protocol, **on), price(asked[1], protocol=versus or protocol, **on)
    names, priced = (first.name, second.name), (first.estimate, second.estimate)
    seq_len = asked[0].title["seq_len"]
    found, even = changes(*priced), _break_even(first, second)
    if format == "json":
        print(json.dumps(differences.document(names, priced, found, even, seq_len=seq_len), allow_nan=False))
    elif format == "csv":
        print_csv([differences.change_record(change) for change in found])
    else:
        told = [] if even is None else differences.break_even_lines(even)
        lines = [*differences.summary(names, priced, seq_len=seq_len), *told]
        print_blocks(lines, [differences.changes_table(found)])


def _break_even(first: PricedModel, second: PricedModel) -> BreakEven | None:
    """None where a network is fitted in."""
    one, other = first.pricer, second.pricer
    if not (isinstance(one, Derived) and isinstance(other, Derived)):
        return None
    return break_even(
        network_use(first.graph, one),
        network_use(second.graph, other),
        at_bandwidth_bits_per_s=one.link.bandwidth_bits_per_s,
        at_rtt_s=one.link.rtt_s,
    )
