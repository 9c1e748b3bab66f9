"""Which placement is best under which protocol and network, and what is lost by taking the pick of another.

The trainings that come with the builtin parent are priced under each, as what they deploy to; nothing is trained. Equal
quality is to be at most so many nats a token above the parent, each training of one seed: of those that are, the one of
least latency is a setting's pick. Another setting's pick loses what it costs more there. Placements were chosen under
`published` for the most part, so that a search under another protocol may find better ones than any of these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from rich.console import Console

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Price, total_price
from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from experiments.bars import table
from nas.searchers.anchors import known_trainings
from nas.searchers.strategy import Trained
from search_spaces.deployed import deployed
from search_spaces.notation import name_of
from search_spaces.space import load_space
from search_spaces.workload import Workload

Prices: TypeAlias = Mapping[str, Sequence[Price]]  # by setting, one for each training


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A protocol, and its network where that is not fitted in."""

    protocol: str
    network: str | None = None

    @property
    def words(self) -> str:
        return self.protocol + (f", {self.network}" if self.network else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it. most_nats: the qualities to compare at, nats a token above the parent."""

    space: str
    seq_len: int
    settings: tuple[Setting, ...]
    most_nats: tuple[float, ...]


def run(name: str, settings: Settings, console: Console) -> None:
    """Prints the picks, and for each quality what every pick costs more under every other setting.

    Raises UserError if no training is of a quality, or one has no price.
    """
    trained = [
        training for training in known_trainings(load_space(settings.space), 0.0) if training.log_perplexity is not None
    ]
    prices = {setting.words: priced(trained, setting, settings.seq_len) for setting in settings.settings}
    console.print(f"{len(trained)} trainings, prompt of {settings.seq_len} tokens; nats a token above the parent")
    for most in settings.most_nats:
        picks = picks_within(trained, prices, most)
        rows = [(setting, *_cells(trained[at], prices[setting][at])) for setting, at in picks.items()]
        columns = ("", "nats", "latency", "sent", "keys", "pick")
        console.print(table(columns, rows, title=f"\nthe cheapest of at most {most:g} nats"))
        losses = losses_of(picks, prices)
        rows = [(f"pick of {setting}", *map("{:+.1%}".format, row)) for setting, row in losses.items()]
        console.print(table(("latency under", *prices), rows, title=f"\nmore latency than the pick, {most:g} nats"))


def priced(trained: Sequence[Trained], setting: Setting, seq_len: int) -> list[Price]:
    """What each training deploys to, priced for one token. Raises UserError for an op without a price."""
    price_op, workload = cache(load_pricer(setting.protocol, setting.network).price), Workload(prompt_len=seq_len)
    graphs = (workload.graphs(deployed(training.member.architecture)) for training in trained)
    return [total_price(price_op(node.op) for graph in several for node in graph) for several in graphs]


def picks_within(trained: Sequence[Trained], prices: Prices, most_nats: float) -> dict[str, int]:
    """The training of least latency that is good enough, by setting. Raises UserError if none is."""
    good = [
        at
        for at, training in enumerate(trained)
        if training.log_perplexity is not None and training.log_perplexity <= most_nats
    ]
    if not good:
        raise UserError(f"`most_nats` must be that of some training, but none is within {most_nats:g}; raise it.")
    return {
        setting: min(good, key=lambda at, costs=costs: (costs[at].latency_s, at))  # type: ignore[misc]
        for setting, costs in prices.items()
    }


def losses_of(picks: Mapping[str, int], prices: Prices) -> dict[str, list[float]]:
    """The share of latency that a setting's pick costs more than the pick of each one, in their order."""
    return {
        setting: [costs[at].latency_s / costs[picks[other]].latency_s - 1 for other, costs in prices.items()]
        for setting, at in picks.items()
    }


def _cells(trained: Trained, price: Price) -> tuple[str, ...]:
    architecture = trained.member.architecture
    keys = "" if price.key_bytes is None else format_bytes(price.key_bytes)
    costs = format_seconds(price.latency_s), format_bytes(price.sent_bytes), keys
    return f"{trained.log_perplexity:.3f}", *costs, name_of(architecture, entropy_regularised=False)
