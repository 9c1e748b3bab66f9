"""Formats estimates as tables, with units chosen by size, and as JSON, in SI units."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, TypeAlias

from rich.table import Table

from costmodel import ops
from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Price, shared_price, total_price
from costmodel.deployment.deploy import Deployment
from costmodel.estimate import Estimate
from costmodel.ops import Op, shape
from costmodel.protocols import Setting
from costmodel.randomness import GeneratorCost
from costmodel.report.tables import table
from costmodel.trust import Trust, facts

PUBLIC = ("temperatures", "bounds of scores", "scalars of shaped attention", "causal mask", "rotary angles")
# Setting -> default, which a summary does not mention.
USUAL = {"weights": "secret", "weight_masks": "fresh", **asdict(Deployment()), "softmax": "exact"}

# The fields of `costmodel.deployment.deploy.Deployment`.
DeploymentFacts: TypeAlias = Mapping[str, Any]

# Keys of a cost in JSON, in order.
PRICE_KEYS = (
    "rounds", "messages", "sent_bytes", "online_bytes", "setup_bytes", "compute_s", "network_s", "latency_s",
    "key_bytes",
)  # fmt: skip


def op_records(estimate: Estimate) -> list[dict[str, Any]]:
    """Return a record of every op, in order; costs are in SI units and sum to the total.

    The keys are `op` (the class), `layer`, `name`, `shape` (made by `ops.shape`), those in PRICE_KEYS, and
    `extrapolation`: the op's amount of work over the largest in the fitted data, at least 1; None if not known.
    """
    return [
        {
            "op": type(node.op).__name__,
            "layer": node.layer,
            "name": node.name,
            "shape": shape(node.op),
            **price_numbers(price),
            "extrapolation": extrapolation,
        }
        for (node, price), extrapolation in zip(estimate.by_op, estimate.extrapolations, strict=True)
    ]


def total_document(estimate: Estimate) -> dict[str, Any]:
    bounds = estimate.latency_s_range
    return {
        **price_numbers(estimate.total),
        "latency_s_range": bounds and [bound if math.isfinite(bound) else None for bound in bounds],  # no JSON infinity
        "extrapolated": list(estimate.extrapolated),
    }


def setting_document(priced: Sequence[Op], setting: Setting | None, deployment: DeploymentFacts) -> dict[str, Any]:
    """Return as JSON data how numbers are represented, what is secret, the deployment, and form of GELU and softmax."""
    return {
        "formulas_of": setting and setting.formulas_of,
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
    """Return the form of all ops of a kind, joined by `+` if a traced model has several; None without any."""
    return "+".join(dict.fromkeys(op.form for op in priced if isinstance(op, kind))) or None


def unusual(priced: Sequence[Op], setting: Setting | None, deployment: DeploymentFacts) -> str:
    """Return the settings that differ from USUAL as text such as `, phase decode`; empty if no setting differs."""
    stated = setting_document(priced, setting, deployment)
    other = {key: stated[key] for key, usual in USUAL.items() if stated[key] not in (None, usual)}
    return "".join(f", {key.replace('_', ' ')} {value}" for key, value in other.items())


def price_numbers(price: Price) -> dict[str, float | int | None]:
    """Return a cost as JSON data with PRICE_KEYS, in SI units."""
    values = asdict(price)
    return {key: values[key] for key in PRICE_KEYS}


def _price_and_end(part: tuple[Any, Price]) -> tuple[Price, str]:
    """Return the price of a layer, and `embed` or `head`, which are never one line with others."""
    return part[1], part[0] if isinstance(part[0], str) else ""


def estimate_tables(estimate: Estimate) -> list[Table]:
    """Return a table of costs by layer, in which equal neighbours share a line, and one by type of op."""
    layers = []
    for (price, _), group in groupby(estimate.by_layer, key=_price_and_end):
        alike = [layer for layer, _ in group]
        one = {"embed": "embedding", "head": "head (vocabulary projection)"}.get(str(alike[0]), f"layer {alike[0]}")
        title = one if len(alike) == 1 else f"layers {alike[0]} to {alike[-1]}"
        layers.append((title, str(len(alike)), total_price([price] * len(alike))))
    by_kind: dict[str, list[Price]] = {}
    beyond: dict[str, float] = {}
    for (node, price), extrapolation in zip(estimate.by_op, estimate.extrapolations, strict=True):
        kind = type(node.op).__name__
        by_kind.setdefault(kind, []).append(price)
        beyond[kind] = max(beyond.get(kind, 1.0), extrapolation or 1.0)
    notes = {kind: f" ({times:.1f}x beyond what was measured)" if times > 1 else "" for kind, times in beyond.items()}
    kinds = [(kind + notes[kind], str(len(prices)), total_price(prices)) for kind, prices in by_kind.items()]
    return [_prices("layer", layers, estimate.total), _prices("op", kinds, estimate.total)]


def _prices(title: str, lines: Iterable[tuple[str, str, Price]], whole: Price) -> Table:
    keys = {} if whole.key_bytes is None else {"keys a party": format_bytes(whole.key_bytes)}
    rows = []
    for name, count, price in lines:
        share = f"{price.latency_s / whole.latency_s:.1%}" if whole.latency_s else ""
        kept = [] if price.key_bytes is None else [format_bytes(price.key_bytes)]
        rows.append([name, count, format_seconds(price.latency_s), share, format_bytes(price.sent_bytes), *kept])
    numbers = ["count", "latency", "share", "communication", *keys]
    shown = table([title], numbers, rows, footers=_footers(title, whole) | keys)
    shown.columns[0].no_wrap = False  # the note on an op may be long; numbers do not wrap
    return shown


def trust_document(trust: Trust, made: Sequence[GeneratorCost] = ()) -> dict[str, Any]:
    """Return a trust as JSON data. made: costs, by formula, of other ways to make the correlated randomness."""
    return {
        **facts(trust),
        "alternatives": [
            {
                "randomness": part.generator.name,
                "trusts": part.generator.trusts,
                "setup_bytes": part.setup_bytes,
                "network_s": part.network_s,
                "measured": False,
                "source": part.generator.source,
            }
            for part in made
        ],
    }


def made_table(made: Sequence[GeneratorCost]) -> Table:
    """Return a table of the costs of making the dealer's correlated randomness in other ways."""
    return table(
        ["correlated randomness by", "trusting"],
        ["sent ahead", "on the network"],
        [
            (part.generator.name, part.generator.trusts, format_bytes(part.setup_bytes), format_seconds(part.network_s))
            for part in made
        ],
        title="without that dealer, by formulas that were not measured here, computing not counted:",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The cost of each run, in order: one new token of each of `batch` sequences; the first run reads the prompts."""

    prompt_len: int
    by_token: tuple[Price, ...]
    batch: int = 1

    @property
    def total(self) -> Price:
        return total_price(self.by_token)

    @property
    def per_token(self) -> Price:
        """The mean cost of a new token of one sequence."""
        return shared_price(self.total, len(self.by_token) * self.batch)


def tokens_document(tokens: Tokens) -> dict[str, Any]:
    """Return costs as JSON data: the mean per token, the prompt's run, later runs together (`decode`), and each run."""
    prompt, *steps = tokens.by_token
    return {
        "new_tokens": len(tokens.by_token),
        "per_token": asdict(tokens.per_token),
        "prompt": asdict(prompt),
        "decode": asdict(total_price(steps)) if steps else None,
        "by_token": token_records(tokens),
    }


def token_records(tokens: Tokens) -> list[dict[str, Any]]:
    """Return a record per new token: its number, from 1, the number of tokens before it (`read`), and its cost."""
    return [
        {"token": index, "read": tokens.prompt_len + index - 1, **asdict(price)}
        for index, price in enumerate(tokens.by_token, start=1)
    ]


def tokens_line(tokens: Tokens) -> str:
    mean, first = (
        f"{format_seconds(price.latency_s)}, {format_bytes(price.sent_bytes)}"
        for price in (tokens.per_token, tokens.by_token[0])
    )
    each = f" of each of {tokens.batch} sequences" if tokens.batch > 1 else ""
    return f"{len(tokens.by_token):,} new tokens{each}: per token {mean}; the prompt and its first {first}"


def tokens_table(tokens: Tokens) -> Table:
    """Return a table of the costs of tokens 1, 2, 5, 10, 20, 50 and so on, of the last token, and of all in total."""
    since_s, rows = 0.0, []
    for index, price in enumerate(tokens.by_token, start=1):
        since_s += price.latency_s
        if str(index).rstrip("0") in ("1", "2", "5") or index == len(tokens.by_token):
            seconds = format_seconds(price.latency_s), format_seconds(since_s)
            rows.append([f"{index:,}", str(tokens.prompt_len + index - 1), *seconds, format_bytes(price.sent_bytes)])
    return table(
        ["new token"],
        ["tokens read", "latency", "since the start", "communication"],
        rows,
        footers=_footers("new token", tokens.total),
    )


def _footers(first: str, whole: Price) -> dict[str, str]:
    return {
        first: "total",
        "latency": format_seconds(whole.latency_s),
        "communication": format_bytes(whole.sent_bytes),
    }
