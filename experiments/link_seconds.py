"""Predicted against measured seconds of whole decoders: a process per party, on a link of limited bandwidth and delay.

Every run starts afresh, so set-up is in both figures. Predictions take the committed testbed, whose seconds are of
another moment and maybe of another machine: `--testbed` of `python -m costmodel estimate` tells how to price with one
of your own. Of the shaped rate TCP carries `GOODPUT`; the rest are headers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from costmodel.config.schema import decode
from costmodel.cost import Price
from costmodel.engine.compare import drawn_tokens, drawn_weights
from costmodel.engine.job import graph_job
from costmodel.engine.links import Condition
from costmodel.engine.shaped_link import shaped, why_not
from costmodel.engine.spu import passes
from costmodel.errors import UserError
from costmodel.estimate import estimate
from costmodel.network import Network
from costmodel.ops import OpGraph
from costmodel.protocols.derived import load
from costmodel.protocols.primitives import EngineSetting
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

GOODPUT = 0.956  # 1,448 bytes of data in a frame of 1,514; measured likewise on an idle link one way
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it. repeats: runs of every model on every link, of which the fastest counts.

    Raises UserError for less than one repeat or a link without a bandwidth.
    """

    architecture: str
    dimensions: Dimensions
    seq_len: int
    protocols: tuple[str, ...]
    links: tuple[Condition, ...]
    repeats: int

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UserError(f"`repeats` must be at least 1, but got {self.repeats}.")
        if any(link.bandwidth_bits_per_s is None for link in self.links):
            raise UserError("every one of `links` needs a `bandwidth_bits_per_s`, but one has none.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """measured_s: the least of several runs."""

    protocol: str
    condition: Condition
    predicted: Price
    measured_s: float


def run(name: str, data: dict[str, Any], console: Console) -> None:
    """Prints a line per protocol and link; says why not where no such link can be made.

    Raises UserError for bad settings.
    """
    settings = decode(Settings, data, f"experiment {name}")
    if (reason := why_not()) is not None:
        console.print(f"skipped: {reason}.")
        return
    member = parse(settings.architecture, base_architecture("tiny", settings.dimensions))
    graph = lower(member.architecture, settings.seq_len)
    table = _table()
    rows = []
    for protocol in settings.protocols:
        for condition in settings.links:
            console.print(f"{protocol} at {_title(condition)}", style="dim")
            rows.append(
                Row(
                    protocol=protocol,
                    condition=condition,
                    predicted=predicted(graph, protocol, condition),
                    measured_s=measured_s(graph, protocol, condition, settings.repeats),
                )
            )
    for row in rows:
        _add(table, row)
    console.print(table)


def predicted(graph: OpGraph, protocol: str, condition: Condition) -> Price:
    """Predicted seconds of the whole graph, on the committed testbed and such a link."""
    assert condition.bandwidth_bits_per_s is not None
    link = Network(
        name="shaped",
        bandwidth_bits_per_s=GOODPUT * condition.bandwidth_bits_per_s,
        rtt_s=2 * condition.delay_s,
        source="this experiment",
    )
    return estimate(graph, load(protocol, link)).total


def measured_s(graph: OpGraph, protocol: str, condition: Condition, repeats: int) -> float:
    """Seconds of the fastest of several fresh runs."""
    generator = np.random.default_rng(SEED)
    weights, tokens = drawn_weights(graph, generator), drawn_tokens(graph, generator)
    job = graph_job(graph, weights, tokens, protocol=protocol, setting=EngineSetting())
    return min(passes(job, shaped, [condition])[0][0].seconds for _ in range(repeats))


def _table() -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("protocol")
    table.add_column("link", no_wrap=True)
    for title in ("computing s", "network s", "predicted s", "measured s", "predicted / measured"):
        table.add_column(title, justify="right")
    return table


def _add(table: Table, row: Row) -> None:
    parts = (row.predicted.compute_s, row.predicted.network_s, row.predicted.latency_s, row.measured_s)
    ratio = row.predicted.latency_s / row.measured_s
    table.add_row(row.protocol, _title(row.condition), *(f"{seconds:.2f}" for seconds in parts), f"{ratio:.2f}")


def _title(condition: Condition) -> str:
    assert condition.bandwidth_bits_per_s is not None
    return f"{condition.bandwidth_bits_per_s / 1e6:.0f} Mbit/s, delay {condition.delay_s * 1e3:.0f} ms"
