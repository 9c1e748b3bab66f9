"""Searchers replayed on the table of trainings: what each finds for the tokens it trains, at no cost.

A training that a searcher asks for is one of the table's, of a seed drawn at random. What it has found by then, the
front of what it saw, is scored by the means over all seeds, and so is the front of the whole table, so that luck counts
for nobody. Proposals come in generations with the lag of a search; every searcher has the same exact budget.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from costmodel.config.units import parse_seconds
from costmodel.cost import Budget
from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from experiments.searchers.table import CONFIGS, TablePart, table_space
from experiments.searchers.table import Settings as TableSettings
from experiments.trainings import DATA, Ended, read_outcomes
from nas.blocks.halves import read
from nas.conversion.parent import load_parent
from nas.recipe.route import parent_architecture
from nas.results.ledger import Status
from nas.results.pareto import Point, hypervolume, nondominated
from nas.searchers.anchors import anchors, published_members
from nas.searchers.registry import searcher_of
from nas.searchers.strategy import SearchProblem
from nas.study.finalists import Result
from nas.study.schedule import GENERATION_SIZE, TrialSchedule
from search_spaces.budget.feasible import FeasibleSpace, price_slices, within_budget
from search_spaces.budget.priced_space import price_space
from search_spaces.notation import Member, parse, placement
from search_spaces.pricing import price_architecture
from search_spaces.space import build_space
from search_spaces.workload import Workload

LEAST_ROWS = 8  # two generations
NUM_SLICES = 4
REACHED = 0.95  # of the hypervolume of the whole table
SEQ_LEN = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it.

    table: that experiment's file. reference_perplexity: of the unigram model. parent_loss: nats, of the parent.
    """

    table: str
    parts: tuple[str, ...]
    budget_latency: str
    reference_perplexity: float
    parent_loss: float
    num_runs: int
    num_trials: int
    searchers: tuple[str, ...]


class Entry(NamedTuple):
    """One architecture of the table. losses: by seed, None if it diverged. tokens: of one training."""

    member: Member
    latency_s: float
    losses: tuple[float | None, ...]
    tokens: int

    @property
    def point(self) -> Point | None:
        """Price and mean loss; None if a seed diverged."""
        known = [loss for loss in self.losses if loss is not None]
        return (self.latency_s, statistics.fmean(known)) if len(known) == len(self.losses) else None


class Curve(NamedTuple):
    """One replayed search: trained tokens and share of the whole table's hypervolume after every generation; and, of
    each slice of the price at the end, the best mean loss found."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    best: tuple[float | None, ...]


def run(name: str, data: dict[str, Any], console: Console) -> None:
    """Prints a table per part. Raises UserError for bad settings, or a part of which too little is trained."""
    settings = decode(Settings, data, f"experiment {name}")
    listed = load_mapping(CONFIGS / settings.table)
    parts = decode(TableSettings, {key: listed[key] for key in listed if key != "kind"}, settings.table).parts
    for part_name in settings.parts:
        entries = read_entries(parts[part_name])
        problem = pool_problem(settings, parts[part_name], entries)
        curves = {
            searcher: [
                replay(searcher, problem, entries, settings.num_trials, seed) for seed in range(settings.num_runs)
            ]
            for searcher in settings.searchers
        }
        for table in tables(part_name, entries, curves):
            console.print(table)


def read_entries(part: TablePart) -> dict[Member, Entry]:
    """What is trained of a part. Raises UserError if that is too little for a search."""
    base = table_space(part).base
    rows: dict[str, list[Ended]] = {}
    for one in read_outcomes(DATA / part.committed):
        rows.setdefault(one.row, []).append(one.ended)
    if len(rows) < LEAST_ROWS:
        raise UserError(
            f"{part.committed} must hold at least {LEAST_ROWS} architectures, but holds {len(rows)}; "
            f"train more of them: python -m experiments run table."
        )
    pricer, found = load_pricer(), dict[Member, Entry]()
    for row, ended in rows.items():
        member = parse(row, base)
        price = price_architecture(member.architecture, pricer, Workload(prompt_len=SEQ_LEN), "deployed").price
        losses = tuple(None if one.perplexity is None else math.log(one.perplexity) for one in ended)
        tokens = max(one.tokens for one in ended)
        found[member] = Entry(member=member, latency_s=price.latency_s, losses=losses, tokens=tokens)
    return found


def pool_problem(settings: Settings, part: TablePart, entries: Mapping[Member, Entry]) -> SearchProblem:
    """What searchers know: a space that lists just the architectures of the table, the parent and its blocks."""
    definition = replace(
        table_space(part).definition,
        choices=None,
        members=tuple(placement(member.architecture) for member in entries),
    )
    priced = price_space(build_space(definition), load_pricer(), SEQ_LEN)
    feasible = within_budget(priced, Budget(latency_s=parse_seconds(settings.budget_latency, "budget_latency")))
    parent = load_parent(part.parent)
    path = DATA / part.blocks
    return SearchProblem(
        feasible=feasible,
        anchors=tuple(anchors(feasible, published_members(feasible.space))),
        reference_loss=math.log(settings.reference_perplexity),
        parent=parent_architecture(parent.route, feasible.space.base),
        parent_loss=settings.parent_loss,
        blocks=read(path.read_text(encoding="utf-8"), str(path)),
    )


def replay(searcher: str, problem: SearchProblem, entries: Mapping[Member, Entry], num_trials: int, seed: int) -> Curve:
    """One search; a training costs the tokens of the table's."""
    schedule = TrialSchedule(strategy=searcher_of(searcher)(problem), seed=seed, num_trials=num_trials)
    rng = np.random.default_rng([seed, 1])
    reference = reference_of(problem)
    whole = hypervolume(_means(entries.values()), reference)
    seen: list[tuple[Entry, float | None]] = []
    tokens, shares = list[int](), list[float]()
    while (proposal := schedule.ask()) is not None:
        entry = entries[proposal.member]
        loss = entry.losses[int(rng.integers(len(entry.losses)))]
        seen.append((entry, loss))
        status: Status = "diverged" if loss is None else "completed"
        schedule.tell(Result(index=proposal.index, status=status, latency_s=entry.latency_s, log_perplexity=loss))
        if len(seen) % GENERATION_SIZE == 0:
            tokens.append(sum(one.tokens for one, _ in seen))
            shares.append(hypervolume(_means(_front(seen)), reference) / whole)
    return Curve(tokens=tuple(tokens), shares=tuple(shares), best=tuple(_best_by_slice(problem.feasible, _front(seen))))


def reference_of(problem: SearchProblem) -> Point:
    """The budget, and what a model without context loses."""
    assert problem.feasible.budget.latency_s is not None
    return problem.feasible.budget.latency_s, problem.reference_loss


def _front(seen: Sequence[tuple[Entry, float | None]]) -> list[Entry]:
    """The entries on the front of what was seen of them."""
    known = [(entry, (entry.latency_s, loss)) for entry, loss in seen if loss is not None]
    kept = nondominated([point for _, point in known])
    return [entry for (entry, _), keep in zip(known, kept, strict=True) if keep]


def _means(entries: Iterable[Entry]) -> list[Point]:
    return [point for entry in entries if (point := entry.point) is not None]


def _best_by_slice(feasible: FeasibleSpace, found: Sequence[Entry]) -> list[float | None]:
    """The least mean loss in each slice of the price, None where there is none."""
    best: list[float | None] = []
    for part in price_slices(feasible, NUM_SLICES):
        losses = [entry.point[1] for entry in found if entry.point is not None and part.fits(entry.member)]
        best.append(min(losses, default=None))
    return best


def tables(part: str, entries: Mapping[Member, Entry], curves: Mapping[str, Sequence[Curve]]) -> list[Table]:
    """Regret by generation, and tokens until REACHED of the whole hypervolume."""
    seeds = sorted({len(entry.losses) for entry in entries.values()})
    growth = Table(
        title=f"part {part}, {len(entries)} architectures, {seeds} seeds: regret, % of hypervolume, median (quartiles)"
    )
    growth.add_column("trained tokens", justify="right")
    for searcher in curves:
        growth.add_column(searcher, justify="right")
    steps = min(len(curve.shares) for each in curves.values() for curve in each)
    for step in range(steps):
        cells = [_quartiles([100 * (1 - curve.shares[step]) for curve in each]) for each in curves.values()]
        growth.add_row(f"{next(iter(curves.values()))[0].tokens[step]:,}", *cells)
    reached = Table(
        title=f"trained tokens until {REACHED:.0%} of the whole table's hypervolume, median; best perplexity by price"
    )
    for column in ("searcher", "tokens", "runs that did", "best perplexity in slices of the price, cheapest first"):
        reached.add_column(column, justify="right")
    for searcher, each in curves.items():
        found = [tokens for curve in each if (tokens := _tokens_until(curve)) is not None]
        median = f"{statistics.median(found):,.0f}" if len(found) == len(each) else "-"
        best = ", ".join(_perplexity([curve.best[place] for curve in each]) for place in range(len(each[0].best)))
        reached.add_row(searcher, median, f"{len(found)} of {len(each)}", best)
    return [growth, reached]


def _tokens_until(curve: Curve) -> int | None:
    return next((tokens for tokens, share in zip(curve.tokens, curve.shares, strict=True) if share >= REACHED), None)


def _quartiles(values: Sequence[float]) -> str:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def _perplexity(losses: Sequence[float | None]) -> str:
    """The median of those that there are, if most runs have one."""
    known = [loss for loss in losses if loss is not None]
    return f"{math.exp(statistics.median(known)):.2f}" if 2 * len(known) > len(losses) else "-"
