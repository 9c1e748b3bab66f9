"""Predicted against measured seconds of whole decoders: a process per party, on a link of limited bandwidth and delay.

Every run starts afresh, so set-up is in both figures. Predictions take the committed testbed, whose seconds are of
another moment and maybe of another machine: `--testbed` of `python -m costmodel estimate` tells how to price with one
of your own. Of the shaped rate TCP carries `GOODPUT`; the rest are headers.
"""

from dataclasses import dataclass
from itertools import product

from rich.console import Console

from costmodel.cost import Price
from costmodel.engine.links import Condition
from costmodel.engine.shaped_link import shaped, why_not
from costmodel.engine.spu import passes
from costmodel.errors import UserError
from costmodel.estimate import estimate
from costmodel.network import Network
from costmodel.ops import OpGraph
from costmodel.protocols.derived import load
from experiments.bars import table
from experiments.seconds import drawn_job
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

GOODPUT = 0.956  # 1,448 bytes of data in a frame of 1,514; measured likewise on an idle link one way


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


def run(name: str, settings: Settings, console: Console) -> None:
    """Prints a line per protocol and link; says why not where no such link can be made."""
    if (reason := why_not()) is not None:
        console.print(f"skipped: {reason}.")
        return
    member = parse(settings.architecture, base_architecture("tiny", settings.dimensions))
    graph = lower(member.architecture, settings.seq_len)
    rows = []
    for protocol, link in product(settings.protocols, settings.links):
        title = f"{protocol} at {(link.bandwidth_bits_per_s or 0) / 1e6:.0f} Mbit/s, delay {link.delay_s * 1e3:.0f} ms"
        console.print(title, style="dim")
        price, job = predicted(graph, protocol, link), drawn_job(graph, protocol)
        whole_s = min(passes(job, shaped, [link])[0][0].seconds for _ in range(settings.repeats))
        seconds = (price.compute_s, price.network_s, price.latency_s, whole_s)
        rows.append((title, *(f"{part:.2f}" for part in seconds), f"{price.latency_s / whole_s:.2f}"))
    columns = ("protocol and link", "computing s", "network s", "predicted s", "measured s", "predicted / measured")
    console.print(table(columns, rows))


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
