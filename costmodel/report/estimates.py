"""Estimates and validations for people (tables) and programs (JSON); prices stay in SI units until here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from rich.table import Table

from costmodel import ops
from costmodel.calibration.second_opinion import Opinion
from costmodel.calibration.validate_published import Check, Derived, RowFlops
from costmodel.config.units import BYTES, format_bytes, format_seconds
from costmodel.cost import Price, total_price
from costmodel.estimate import Estimate
from costmodel.execution.memory import PeakMemory
from costmodel.ops import LayerId, Op, shape
from costmodel.protocols.compute_testbed import ComputeTestbed
from costmodel.protocols.identity import ENGINE
from costmodel.protocols.primitives import EngineSetting
from costmodel.protocols.published_rows import PublishedRow
from costmodel.randomness.makers import Made
from costmodel.report.memory import memory_document, memory_line
from costmodel.report.tokens import Tokens, tokens_document, tokens_line
from costmodel.report.trust import made_table, trust_document
from costmodel.trust.adversary import described
from costmodel.trust.data_range import said

UNCHECKED = "that costs grow with these as counts do is assumed, and no error is known"
WIDER = "these do so many times more than what was measured, and the range is wider for it"
MENTIONED_SHARE = 0.005  # what rounds to less than 1 % is left out
PUBLIC = ("temperatures", "scalars of shaped attention", "causal mask", "rotary angles")
# What a summary does not mention, since it is so unless asked for.
USUAL = {
    "weights": "secret",
    "weight_masks": "fresh",
    "embedding": "one-hot",
    "projection": "all",
    "phase": "prefill",
    "rows": "all",
    "query_block": None,
    "batch": 1,
    "vocab_blocks": 1,
    "softmax": "exact",
}

# A model's deployment, as `costmodel.deployment` names its choices.
DeploymentFacts: TypeAlias = Mapping[str, str | int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployedForm:
    """What is left of an architecture once everything linear is folded away, and its own estimate.

    notation: the papers' name, or the placement where there is none. deployed_id: of the deployed architecture.
    """

    notation: str
    placement: str
    deployed_id: str
    estimate: Estimate


# The order of a price's keys in JSON.
PRICE_KEYS = (
    "rounds",
    "messages",
    "sent_bytes",
    "online_bytes",
    "setup_bytes",
    "compute_s",
    "network_s",
    "latency_s",
)


def document(
    estimate: Estimate,
    setting: EngineSetting | None,
    *,
    architecture: str,
    base: str | None,
    seq_len: int,
    deployment: DeploymentFacts,
    deployed: DeployedForm | None,
    tokens: Tokens | None = None,
    memory: PeakMemory | None = None,
    made: Sequence[Made] = (),
    egress_price: float | None = None,
) -> dict[str, Any]:
    """The estimate as JSON data: SI numbers, every key always there, null for what is not known.

    `by_layer` and `by_op` sum to `total`, key by key of a price, which is of the architecture as it is written.
    extrapolation: how many times more an op does than any that was measured, at least 1. setting: None where it is
    fitted in. deployed: None where a traced model decides. tokens: what each new token costs, where they are asked
    for; the other prices are of them all. memory: None where nobody measured it. made: what it costs to do without a
    dealer. egress_price: money for each GB that is sent.
    """
    return {
        "architecture": architecture,
        "base": base,
        "seq_len": seq_len,
        "protocol": estimate.protocol,
        "network": estimate.network,
        "trust": trust_document(estimate.trust, made),
        "total": total_document(estimate),
        "by_layer": [{"layer": layer, **_numbers(price)} for layer, price in estimate.by_layer],
        "by_op": op_records(estimate),
        "setting": setting_document([node.op for node, _ in estimate.by_op], setting, deployment),
        "deployed": deployed
        and {
            "notation": deployed.notation,
            "placement": deployed.placement,
            "deployed_id": deployed.deployed_id,
            "total": total_document(deployed.estimate),
        },
        "tokens": tokens and tokens_document(tokens),
        "memory": memory_document(memory),
        "egress": None
        if egress_price is None
        else {"price_per_gigabyte": egress_price, "price": egress(estimate, egress_price)},
    }


def egress(estimate: Estimate, price_per_gigabyte: float) -> float:
    """Money for all bytes sent, of every party, what a dealer makes left out."""
    return estimate.total.sent_bytes / BYTES["GB"] * price_per_gigabyte


def op_records(estimate: Estimate) -> list[dict[str, Any]]:
    """Every op with its price, in order; sums to the total."""
    return [
        {
            "op": type(node.op).__name__,
            "layer": node.layer,
            "name": node.name,
            "shape": shape(node.op),
            **_numbers(price),
            "extrapolation": extrapolation,
        }
        for (node, price), extrapolation in zip(estimate.by_op, estimate.extrapolations, strict=True)
    ]


def total_document(estimate: Estimate) -> dict[str, Any]:
    return {
        **_numbers(estimate.total),
        "latency_s_range": _range(estimate.latency_s_range),
        "prior_share": estimate.prior_share,
        "extrapolated": list(estimate.extrapolated),
    }


def setting_document(
    priced: Sequence[Op], setting: EngineSetting | None, deployment: DeploymentFacts
) -> dict[str, Any]:
    """What was priced or run, as JSON data: the numbers, who holds what, the deployment, and the ops' forms."""
    return {
        "formulas_of": setting and ENGINE,
        "ring_bits": setting and setting.ring_bits,
        "fraction_bits": setting and setting.fraction_bits,
        "inputs": "secret",
        "weights": setting and setting.weights,
        "weight_masks": setting and setting.weight_masks,
        "public": setting and list(PUBLIC),
        **deployment,
        "gelu": _forms(priced, ops.Gelu),
        "softmax": _forms(priced, ops.Softmax),
    }


def _forms(priced: Sequence[Op], kind: type[ops.Gelu] | type[ops.Softmax]) -> str | None:
    """The form of all ops of a kind; several joined by `+`, which a traced model may have, and None without any."""
    return "+".join(dict.fromkeys(op.form for op in priced if isinstance(op, kind))) or None


def unusual(priced: Sequence[Op], setting: EngineSetting | None, deployment: DeploymentFacts) -> str:
    """Whatever a reader might not expect, such as `, phase decode`."""
    found = setting_document(priced, setting, deployment)
    told = {key: found[key] for key, usual in USUAL.items() if found[key] not in (None, usual)}
    return "".join(f", {key.replace('_', ' ')} {value}" for key, value in told.items())


def _numbers(price: Price) -> dict[str, float | int | None]:
    values = asdict(price)
    return {key: values[key] for key in PRICE_KEYS}


def _range(bounds: tuple[float, float] | None) -> list[float | None] | None:
    """JSON has no infinity: an end that nothing limits is null."""
    return None if bounds is None else [bound if math.isfinite(bound) else None for bound in bounds]


def summary(
    estimate: Estimate,
    setting: EngineSetting | None,
    *,
    architecture: str,
    base: str | None,
    seq_len: int,
    deployment: DeploymentFacts,
    deployed: DeployedForm | None,
    tokens: Tokens | None = None,
    memory: PeakMemory | None = None,
    egress_price: float | None = None,
) -> list[str]:
    """What a reader wants first, one line each."""
    asked = unusual([node.op for node, _ in estimate.by_op], setting, deployment)
    on_network = f" on {estimate.network}" if estimate.network else ""
    lines = [
        f"{architecture}{f' on {base}' if base else ''}, T={seq_len}, protocol {estimate.protocol}{on_network}{asked}",
        f"latency {format_seconds(estimate.total.latency_s)}, communication {format_bytes(estimate.total.sent_bytes)}",
        *([tokens_line(tokens)] if tokens else []),
        *([f"{said(estimate.extrapolated)}; {_unchecked(estimate)}"] if estimate.extrapolated else []),
    ]
    if estimate.total.compute_s is not None and estimate.total.network_s is not None:
        lines.append(
            f"of it computing {format_seconds(estimate.total.compute_s)}, on the network "
            f"{format_seconds(estimate.total.network_s)}, one after the other; {estimate.total.rounds:,} rounds, "
            f"set-up {format_bytes(estimate.total.setup_bytes or 0)}"
            f"{' between them, what a dealer makes not counted' if estimate.trust.dealer else ''}"
        )
    if memory is not None:
        lines.append(memory_line(memory))
    if egress_price is not None:
        num_tokens = int(deployment.get("batch") or 1) * (1 if tokens is None else len(tokens.by_token))
        money = egress(estimate, egress_price) / num_tokens
        lines.append(f"egress: {money:.4g} per token at {egress_price:g} a GB, all parties' bytes")
    lines.append(f"trust: {described(estimate.trust)}")
    if setting is not None:
        lines.append(f"formulas and seconds of {ENGINE}")
    if estimate.latency_s_range is not None:
        low, high = map(format_seconds, estimate.latency_s_range)
        lines.append(f"latency range, {estimate.range_over}: {low} to {high}")
    if estimate.prior_share is not None:
        lines.append(
            f"share of the latency in terms that priors alone identify: {estimate.prior_share:.1%} "
            "(not counted: the split between embedding and head, an assumption too"
            f"{'; nor that costs grow as counts do where it is extrapolated' if estimate.extrapolated else ''})"
        )
    if deployed is not None:
        lines.append(_deployed_line(deployed))
    return lines


def _unchecked(estimate: Estimate) -> str:
    """What the error of extrapolated prices is."""
    return UNCHECKED if estimate.total.compute_s is None else WIDER


def _deployed_line(deployed: DeployedForm) -> str:
    layers = "" if deployed.notation == deployed.placement else f" ({deployed.placement})"
    total = deployed.estimate.total
    price = f"{format_seconds(total.latency_s)}, {format_bytes(total.sent_bytes)}"
    outside = said(deployed.estimate.extrapolated)
    return f"deployed: {deployed.notation}{layers}, {price}{outside and f'; {outside}'}"


def estimate_tables(estimate: Estimate, made: Sequence[Made] = ()) -> list[Table]:
    """Per layer, and per kind of op, embedding and vocabulary projection included; and what it costs to do without a
    dealer, if there is one.
    """
    layers = [(_layer_title(layer), "", price) for layer, price in estimate.by_layer]
    by_kind: dict[str, list[Price]] = {}
    beyond: dict[str, float] = {}
    for (node, price), extrapolation in zip(estimate.by_op, estimate.extrapolations, strict=True):
        kind = type(node.op).__name__
        by_kind.setdefault(kind, []).append(price)
        beyond[kind] = max(beyond.get(kind, 1.0), extrapolation or 1.0)
    kinds = [(kind + _beyond(beyond[kind]), str(len(prices)), total_price(prices)) for kind, prices in by_kind.items()]
    tables = [_prices("layer", layers, estimate.total), _prices("op", kinds, estimate.total)]
    return [*([made_table(made)] if made else []), *tables]


def _beyond(extrapolation: float) -> str:
    """What a line says of seconds that no measurement bounds."""
    return f" ({extrapolation:.1f}x beyond what was measured)" if extrapolation > 1 else ""


def _layer_title(layer: LayerId) -> str:
    return {"embed": "embedding", "head": "head (vocabulary projection)"}.get(str(layer), f"layer {layer}")


def _prices(title: str, lines: Iterable[tuple[str, str, Price]], whole: Price) -> Table:
    table = Table(box=None, pad_edge=False, show_footer=True)
    table.add_column(title, footer="total")
    table.add_column("count", justify="right")
    table.add_column("latency", justify="right", footer=format_seconds(whole.latency_s))
    table.add_column("share", justify="right")
    table.add_column("communication", justify="right", footer=format_bytes(whole.sent_bytes))
    for name, count, price in lines:
        share = f"{price.latency_s / whole.latency_s:.1%}" if whole.latency_s else ""
        table.add_row(name, count, format_seconds(price.latency_s), share, format_bytes(price.sent_bytes))
    return table


def rows_table(
    rows: Sequence[PublishedRow],
    *,
    sent_bytes_errors: Sequence[float],
    latency_errors: Sequence[float],
    flops: Mapping[str, RowFlops],
) -> Table:
    """Every printed row: printed and predicted communication and latency, FLOPs, errors in percent."""
    table = Table(box=None, pad_edge=False)
    table.add_column("row", no_wrap=True)
    for title in ("GB", "predicted", "error", "min", "predicted", "error", "FFN GFLOP", "attention GFLOP"):
        table.add_column(title, justify="right")
    for row, byte_error, latency_error in zip(rows, sent_bytes_errors, latency_errors, strict=True):
        gigabytes, minutes = float(row.sent_gigabytes), float(row.latency_min)
        same = flops[row.name].matches(row)
        table.add_row(
            row.name,
            str(row.sent_gigabytes),
            f"{gigabytes * (1 + byte_error):.2f}",
            f"{byte_error:+.2%}",
            str(row.latency_min),
            f"{minutes * (1 + latency_error):.2f}",
            f"{latency_error:+.2%}",
            f"{flops[row.name].ffn_gflop}",
            f"{flops[row.name].attention_gflop}{'' if same else ' (not as printed)'}",
        )
    return table


def derived_table(terms: Iterable[Derived], sent_bytes: Mapping[str, float]) -> Table:
    """Fitted bytes per unit beside those of the formulas, and which primitives send the latter."""
    table = Table(box=None, pad_edge=False)
    table.add_column("bytes per unit of", no_wrap=True)
    for title in ("fitted", "derived"):
        table.add_column(title, justify="right")
    table.add_column("of the derived bytes")
    for term in terms:
        parts = sorted(term.by_primitive.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= MENTIONED_SHARE)
        table.add_row(term.title, f"{sent_bytes[term.term]:.1f}", f"{term.sent_bytes:.1f}", shares)
    return table


def opinions_table(opinions: Iterable[Opinion]) -> Table:
    """What another framework says of the same op, beside the formulas, and how far apart they are."""
    table = Table(box=None, pad_edge=False)
    table.add_column("bytes of all parties", no_wrap=True)
    for title in ("MP-SPDZ", "here", "ratio", "bar", "verdict"):
        table.add_column(title, justify="right")
    for one in opinions:
        sizes = [format_bytes(one.other_bytes), format_bytes(one.own_bytes)]
        judged = ["", ""] if one.bar is None else [f"{one.bar:.0%}", "pass" if one.check.passed else "FAIL"]
        table.add_row(one.title, *sizes, f"{one.own_bytes / one.other_bytes:.2f}", *judged)
    return table


def ops_table(testbed: ComputeTestbed) -> Table:
    """The ops that were measured one by one, the slowest first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("op", no_wrap=True)
    for title in ("seconds", "made ahead", "spread", "runs"):
        table.add_column(title, justify="right")
    for name, found in sorted(testbed.ops.items(), key=lambda item: -item[1].seconds):
        ahead = format_seconds(found.setup_s) if found.setup_s else ""
        table.add_row(name, format_seconds(found.seconds), ahead, f"{found.spread:.0%}", str(found.num_runs))
    return table


def checks_table(checks: Iterable[Check]) -> Table:
    """Figures with their bars: pass, FAIL, or reported only."""
    table = Table(box=None, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for title in ("value", "bar", "verdict"):
        table.add_column(title, justify="right")
    for check in checks:
        verdict = "" if check.bar is None else "pass" if check.passed else "FAIL"
        bar = "" if check.bar is None else f"{check.bar:.1%}"
        table.add_row(check.name, f"{check.value:.2%}", bar, verdict)
    return table
