"""A grid of prices: everything that a page shows, under every protocol, network and prompt length that it offers.

The page looks prices up and never computes one, so that what it says is what the cost model says.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, TypeAlias

from costmodel.cost import Budget, Price, shared_price, total_price
from costmodel.errors import UserError
from costmodel.estimate import Pricer, outside_data
from costmodel.ops import OpGraph
from costmodel.protocols import PROTOCOLS, load_pricer
from costmodel.trust import caption
from nas.report.cost_parts import by_part, kind_of
from nas.report.html.points import Point
from nas.run.front import is_eligible
from nas.run.pareto import nondominated
from nas.run.run import Run
from search_spaces.architecture import Architecture

NETWORKS = ("lan", "wan", "cheetah-lan", "bumblebee-wan")  # beside the run's own
SEQ_LENS = (64, 128, 256, 512)  # beside the run's own; as far as the context goes
DIGITS = 6  # of a number of the grid

MEASURES = ("latency_s", "sent_bytes", "rounds")

Graphs: TypeAlias = Callable[[Architecture, int], list[OpGraph]]


class Setting(NamedTuple):
    """A protocol, network and prompt, and the prices of all points under them, in their order.

    outside: what of the trained members lies outside the data of the prices, in words.
    totals: a point's measures; None where the protocol does not tell them. kinds: kinds of op.
    parts: of every point, by measure, a number a kind. fronts: by measure, the points that are not dominated, cheapest
    first. budgets: by measure, the most that was allowed, None without a bound.
    """

    protocol: str
    network: str | None
    seq_len: int
    trust: str
    outside: str
    totals: tuple[tuple[float | None, ...], ...]
    kinds: tuple[str, ...]
    parts: tuple[tuple[tuple[float, ...] | None, ...], ...]
    fronts: tuple[tuple[int, ...] | None, ...]
    budgets: tuple[float | None, ...]


class Grid(NamedTuple):
    """settings: the run's own first. left_out: settings that cannot be priced, with the reason."""

    settings: tuple[Setting, ...]
    left_out: tuple[str, ...]


def price_grid(run: Run, points: Sequence[Point]) -> Grid:
    """Prices all points under the run's own setting and every other that it can be asked about."""
    graphs = cache(lambda form, seq_len: replace(run.workload, prompt_len=seq_len).graphs(form))
    first = _priced(run, run.pricer, run.seq_len, points, graphs)
    settings, left_out = [_as_searched(run, first, points)], list[str]()
    for pricer in _pricers(run, left_out):
        for seq_len in _seq_lens(run):
            if (pricer.protocol, pricer.network, seq_len) == (first.protocol, first.network, first.seq_len):
                continue
            try:
                settings.append(_priced(run, pricer, seq_len, points, graphs))
            except UserError as error:
                left_out.append(f"{pricer.protocol}: {error}")
    return Grid(tuple(settings), tuple(dict.fromkeys(left_out)))


def _pricers(run: Run, left_out: list[str]) -> Iterator[Pricer]:
    """The run's own first, so that a testbed of the user's is not taken for the committed one."""
    yield run.pricer
    for protocol in PROTOCOLS:
        for network in (None,) if protocol == "published" else NETWORKS:
            if (protocol, network) != (run.pricer.protocol, run.pricer.network):
                try:
                    yield load_pricer(protocol, network, None, run.config.setting_of(protocol))
                except UserError as error:
                    left_out.append(f"{protocol}: {error}")


def _seq_lens(run: Run) -> list[int]:
    """The lengths of prompts; with several new tokens the run's alone, since each token has a graph of its own."""
    if run.workload.new_tokens > 1:
        return [run.seq_len]
    return sorted({run.seq_len, *(length for length in SEQ_LENS if length <= run.base.context)})


def _priced(run: Run, pricer: Pricer, seq_len: int, points: Sequence[Point], graphs: Graphs) -> Setting:
    """Raises UserError if an op has no price."""
    price = cache(pricer.price)
    wholes = [by_part(graphs(point.architecture, seq_len), price, kind_of) for point in points]
    by_kind = [
        {kind: shared_price(whole, run.workload.new_tokens) for kind, whole in parts.items()} for parts in wholes
    ]
    totals = [total_price(prices.values()) for prices in by_kind]
    kinds = tuple(dict.fromkeys(kind for prices in by_kind for kind in prices))
    trained = [point for point in points if point.member is not None]
    measures = tuple(_measures(total) for total in totals)
    return Setting(
        protocol=pricer.protocol,
        network=pricer.network,
        seq_len=seq_len,
        trust=caption(pricer.trust),
        outside=outside_data(pricer, (graph for point in trained for graph in graphs(point.architecture, seq_len))),
        totals=measures,
        kinds=kinds,
        parts=tuple(_parts(prices, kinds) for prices in by_kind),
        fronts=_fronts(points, measures, Budget(), ("candidate", "baseline")),
        budgets=(None,) * len(MEASURES),
    )


def _as_searched(run: Run, priced: Setting, points: Sequence[Point]) -> Setting:
    """The run's own setting: with the prices of its ledger, within its budget, and candidates alone on the front."""
    totals = tuple(
        known
        if (member := point.member) is None
        else (member.latency_s, member.sent_bytes, member.most_expensive.rounds)
        for point, known in zip(points, priced.totals, strict=True)
    )
    return priced._replace(
        totals=totals,
        fronts=_fronts(points, totals, run.budget, ("candidate",)),
        budgets=(run.budget.latency_s, run.budget.sent_bytes, None),
    )


def _measures(price: Price) -> tuple[float | None, ...]:
    values = [getattr(price, name) for name in MEASURES]
    return tuple(None if value is None else _short(value) for value in values)


def _parts(prices: dict[str, Price], kinds: Sequence[str]) -> tuple[tuple[float, ...] | None, ...]:
    """Numbers by measure, one a kind; None for a measure that the protocol does not tell."""
    columns = [[getattr(prices[kind], name) if kind in prices else 0.0 for kind in kinds] for name in MEASURES]
    return tuple(None if None in column else tuple(map(_short, column)) for column in columns)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _fronts(
    points: Sequence[Point], totals: Sequence[tuple[float | None, ...]], budget: Budget, roles: Collection[str]
) -> tuple[tuple[int, ...] | None, ...]:
    """The front of each measure; None where that is not known."""
    losses = {
        index: point.member.mean_loss
        for index, point in enumerate(points)
        if point.member is not None and point.member.role in roles and is_eligible(point.member, budget)
    }
    fronts: list[tuple[int, ...] | None] = []
    for place in range(len(MEASURES)):
        prices = {index: price for index in losses if (price := totals[index][place]) is not None}
        if len(prices) < len(losses):
            fronts.append(None)
            continue
        kept = nondominated([(prices[index], loss) for index, loss in losses.items()])
        front = [index for index, keep in zip(losses, kept, strict=True) if keep]
        fronts.append(tuple(sorted(front, key=lambda index: prices[index])))
    return tuple(fronts)
