"""Formats comparisons of predicted and measured costs as tables and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.engine import spu
from costmodel.engine.compare import SEED, Comparison
from costmodel.engine.registry import engine_of
from costmodel.engine.session import Measured
from costmodel.estimate import Estimate
from costmodel.execution.memory import PeakMemory
from costmodel.ops import Node, shape
from costmodel.protocols import TRUST
from costmodel.protocols.primitives import Comm, total_comm
from costmodel.report.estimates import (
    PRICE_KEYS,
    DeploymentFacts,
    setting_document,
    total_document,
    trust_document,
    unusual,
)
from costmodel.report.tables import table
from costmodel.trust import described, shown

NO_MEASURED_ROUNDS = "the engine counts messages, not rounds"


def document(
    comparison: Comparison, title: Mapping[str, Any], deployment: DeploymentFacts, on_network: Estimate | None
) -> dict[str, Any]:
    """Return the comparison as JSON data in SI units; every key is always present, with null for what is not known.

    title: first entries of the data, which name the model. on_network: prediction for a network, or None. Costs in
    `by_op` sum to `total`. `network` is null, since latency is measured with one process per party on one machine.
    """
    return {
        **title,
        "protocol": comparison.protocol,
        "network": None,
        "trust": trust_document(TRUST[comparison.protocol]),
        "total": {
            "predicted": {
                **_predicted(comparison.predicted, _whole(comparison.predicted_s)),
                "latency_s_range": None if comparison.range_s is None else list(comparison.range_s),
            },
            "measured": {
                **(measured := _measured(comparison.measured, comparison.rounds.rounds if comparison.rounds else None)),
                "rounds_reason": NO_MEASURED_ROUNDS if measured["rounds"] is None else None,
            },
            "logits_max_abs_error": comparison.logits_max_abs_error,
            "top1_agreement": comparison.top1_agreement,
        },
        "by_op": [
            {**node, "predicted": predicted, "measured": measured}
            for node, predicted, measured in _ops_with_prices(comparison)
        ],
        "on_network": on_network and {"network": on_network.network, "predicted": total_document(on_network)},
        "setting": {
            "engine": _engine(comparison),
            **setting_document([node.op for node, _, _ in comparison.by_op], comparison.setting, deployment),
            "weights_seed": SEED if comparison.drawn_weights else None,
            "tokens_seed": SEED,
            "compiler_options": "default",
            "parallelism": "off",
            "link": engine_of(comparison.protocol).link,
            "delays_s": None if comparison.rounds is None else [delay_s for delay_s, _ in comparison.rounds.seconds],
        },
        "memory": {
            "predicted": comparison.memory and asdict(comparison.memory),
            "measured_bytes": list(comparison.peak_bytes),
        },
    }


def op_records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a record per op, in order, with predicted and measured costs in SI units."""
    return [
        {
            **node,
            **{f"predicted_{key}": value for key, value in predicted.items()},
            **{f"measured_{key}": value for key, value in measured.items()},
        }
        for node, predicted, measured in _ops_with_prices(comparison)
    ]


def _lines(comparison: Comparison) -> list[tuple[Node, Comm, Measured, float | None, float | None]]:
    unknown = [None] * len(comparison.by_op)
    seconds = comparison.predicted_s or unknown
    rounds = unknown if comparison.rounds is None else comparison.rounds.by_op
    lines = zip(comparison.by_op, seconds, rounds, strict=True)
    return [(node, comm, cost, its_seconds, its_rounds) for (node, comm, cost), its_seconds, its_rounds in lines]


def _ops_with_prices(comparison: Comparison) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    for node, comm, cost, seconds, rounds in _lines(comparison):
        facts = {"op": type(node.op).__name__, "layer": node.layer, "name": node.name, "shape": shape(node.op)}
        yield facts, _predicted(comm, seconds), _measured(cost, rounds)


def _predicted(comm: Comm, seconds: float | None) -> dict[str, Any]:
    """Return the prediction as JSON data; on one machine, all seconds are compute seconds."""
    return _price(
        compute_s=seconds,
        network_s=None if seconds is None else 0.0,
        latency_s=seconds,
        rounds=comm.rounds,
        messages=comm.messages,
        sent_bytes=comm.sent_bytes,
        online_bytes=comm.online_bytes,
        setup_bytes=comm.setup_bytes,
    )


def _whole(seconds: Sequence[float] | None) -> float | None:
    return None if seconds is None else sum(seconds)


def _measured(cost: Measured, rounds: float | None) -> dict[str, Any]:
    # the engine does not separate online from offline, or computing from waiting
    counted = cost.rounds if rounds is None else rounds
    return _price(messages=cost.messages, sent_bytes=cost.sent_bytes, latency_s=cost.seconds, rounds=counted)


def _price(**known: float | None) -> dict[str, float | None]:
    return {key: known.get(key) for key in PRICE_KEYS}


def _engine(comparison: Comparison) -> str:
    package = engine_of(comparison.protocol).package
    return f"{package} {version(package)}"


def summary(comparison: Comparison, model: str, deployment: DeploymentFacts, on_network: Estimate | None) -> list[str]:
    """Return the main results as lines. model: the model in words. Other arguments are those of `document`."""
    predicted, measured, setting = comparison.predicted, comparison.measured, comparison.setting
    difference = _difference(predicted.sent_bytes, measured.sent_bytes)
    whose = shown(deployment["public_layers"], deployment["client_layers"])
    lines = [
        f"{model}, protocol {comparison.protocol}, "
        f"ring of {setting.ring_bits} bits, {setting.fraction_bits} of them fraction"
        f"{unusual([node.op for node, _, _ in comparison.by_op], setting, deployment)}",
        f"trust: {described(TRUST[comparison.protocol])}{whose}",
        f"formulas of {setting.formulas_of}, run under {_engine(comparison)}",
        f"sent by all parties: predicted {format_bytes(predicted.sent_bytes)}, "
        f"measured {format_bytes(measured.sent_bytes)} ({difference}); "
        f"messages: predicted {predicted.messages:,}, measured {measured.messages:,}",
        f"rounds: predicted {predicted.rounds:,}, {_rounds(comparison)}",
        f"logits: greatest error {comparison.logits_max_abs_error:.2g}, same top-1 on {comparison.top1_agreement:.1%} "
        "of the tokens",
        f"seconds, a process per party on one machine: {_predicted_seconds(comparison)}, "
        f"measured {format_seconds(measured.seconds)}",
        _memory_line(comparison.memory, comparison.peak_bytes),
    ]
    if on_network is not None:
        latency, waited = map(format_seconds, (on_network.total.latency_s, on_network.total.network_s or 0.0))
        lines.append(f"predicted on {on_network.network}, not measured: {latency}, of it on the network {waited}")
    return lines


def _predicted_seconds(comparison: Comparison) -> str:
    whole, range_s = _whole(comparison.predicted_s), comparison.range_s
    if whole is None or range_s is None:
        return "not predicted in this ring"
    low, high = map(format_seconds, range_s)
    testbed = "the committed testbed" if comparison.testbed is None else f"testbed {comparison.testbed}"
    return f"predicted on {testbed} {format_seconds(whole)} ({low} to {high})"


def _rounds(comparison: Comparison) -> str:
    measured, counted = comparison.rounds, comparison.measured.rounds
    if counted is not None:
        return f"measured {counted:,}"
    if measured is None:
        return f"not measured ({NO_MEASURED_ROUNDS}; --delays 10ms,20ms,40ms measures them)"
    delays = ", ".join(f"{delay_s * 1000:g}" for delay_s, _ in measured.seconds)
    return (
        f"measured {measured.rounds:,.1f} (slope over one-way delays of {delays} ms, "
        f"off the line by at most {format_seconds(measured.residual_s)})"
    )


def _memory_line(memory: PeakMemory | None, measured: Sequence[int | None]) -> str:
    known = [size for size in measured if size is not None]
    if len(known) < 2:
        return "peak memory: not measured on this system"
    was = f"measured {format_bytes(max(known[1:]))} and {format_bytes(known[0])}"
    where = "peak memory of a party, and of the first one, which also prepares the run"
    if memory is None:
        return f"{where}: {was}; none predicted with these flags"
    errors = [memory.party_bytes / max(known[1:]) - 1, memory.client_bytes / known[0] - 1]
    sizes = f"{format_bytes(memory.party_bytes)} and {format_bytes(memory.client_bytes)}"
    return f"{where}: predicted {sizes}, {was} ({errors[0]:+.1%}, {errors[1]:+.1%})"


def comparison_table(comparison: Comparison) -> Table:
    """Return a table of predicted and measured costs: a row per op, then one per type of op, and the total."""
    titles = ["predicted bytes", "measured", "difference", "predicted messages", "measured", "rounds"]
    shown = table(["op"], [*titles, "predicted s", "measured"], [])
    kinds: dict[str, list[tuple[Comm, Measured, float | None]]] = {}
    for node, comm, cost, seconds, _ in _lines(comparison):
        shown.add_row(node.name, *_cells(comm, cost, seconds))
        kinds.setdefault(type(node.op).__name__, []).append((comm, cost, seconds))
    shown.add_section()
    for kind, parts in kinds.items():
        comms, costs, known = zip(*parts, strict=True)
        whole = None if comparison.predicted_s is None else sum(known)
        shown.add_row(f"all {kind}", *_cells(total_comm(comms), spu.total_measured(costs), whole))
    shown.add_section()
    shown.add_row("total", *_cells(comparison.predicted, comparison.measured, _whole(comparison.predicted_s)))
    return shown


def _cells(comm: Comm, cost: Measured, seconds: float | None) -> list[str]:
    return [
        f"{comm.sent_bytes:,}",
        f"{cost.sent_bytes:,}",
        _difference(comm.sent_bytes, cost.sent_bytes),
        f"{comm.messages:,}",
        f"{cost.messages:,}",
        f"{comm.rounds:,}",
        "" if seconds is None else f"{seconds:.3f}",
        f"{cost.seconds:.3f}",
    ]


def _difference(predicted: int, measured: int) -> str:
    if predicted == measured:
        return "equal"
    return f"{predicted / measured - 1:+.3%}" if measured else "none measured"
