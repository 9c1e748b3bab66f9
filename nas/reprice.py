"""A finished run under other prices: protocol, network, testbed, prompt or budget. Nothing is trained again.

Every completed trial is priced anew, baselines too, which other prices may make worth having; perplexities are
those of the run, trained at its own sequence length. The front is recomputed, its members before and after compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.table import Table

from costmodel.cost import Budget
from costmodel.estimate import Pricer
from costmodel.units import format_bytes, format_seconds
from nas import ledger
from nas.front import front, point
from nas.ledger import Record
from nas.pareto import dominates, knee, nondominated
from search_spaces.feasible import format_budget
from search_spaces.lower import lower
from search_spaces.notation import parse
from search_spaces.prices import price_space
from search_spaces.space import SearchSpace
from search_spaces.vectorised import price_many, price_table, rows_of

Fate = Literal["stays", "enters", "over budget", "dominated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The completed trials of a run, at their prices of then and at others.

    trials, repriced: the same trials in the same order. before, after: the two fronts, cheapest first.
    seq_len_before, seq_len_after: of the prompts that are priced; all trials were trained at the first.
    """

    trials: tuple[Record, ...]
    repriced: tuple[Record, ...]
    before: tuple[Record, ...]
    after: tuple[Record, ...]
    budget_before: Budget
    budget_after: Budget
    seq_len_before: int
    seq_len_after: int

    @property
    def shown(self) -> tuple[Record, ...]:
        """The re-priced members of either front, cheapest first."""
        names = {record.trial_id for record in (*self.before, *self.after)}
        return tuple(sorted((one for one in self.repriced if one.trial_id in names), key=point))

    @property
    def title_before(self) -> str:
        return _setting(self.trials[0], self.seq_len_before)

    @property
    def title_after(self) -> str:
        return _setting(self.repriced[0], self.seq_len_after)


def what_if(
    records: Sequence[Record],
    space: SearchSpace,
    pricer: Pricer,
    *,
    seq_lens: tuple[int, int],
    budgets: tuple[Budget, Budget],
) -> WhatIf:
    """A run's ledger under another pricer. seq_lens, budgets: (of the run, to price for).

    Raises ValueError if no trial is completed, the base cannot take the sequence length, or an op has no price.
    """
    trials = ledger.completed(records)
    if not trials:
        raise ValueError("the run has no completed trial yet, so there is nothing to price anew.")
    repriced = _repriced(trials, space, pricer, seq_lens[1])
    before, after = front(records, budgets[0]), _front(repriced, budgets[1])
    names = {record.trial_id for record in (*before, *after)}
    repriced = tuple(_with_range(one, space, pricer, seq_lens[1]) if one.trial_id in names else one for one in repriced)
    return WhatIf(
        trials=trials,
        repriced=repriced,
        before=before,
        after=_front(repriced, budgets[1]),
        budget_before=budgets[0],
        budget_after=budgets[1],
        seq_len_before=seq_lens[0],
        seq_len_after=seq_lens[1],
    )


def fate(found: WhatIf, member: Record) -> Fate:
    """What became of a re-priced member of either front."""
    if member not in found.after:
        return "dominated" if _admits(found.budget_after, member) else "over budget"
    return "stays" if member.trial_id in {one.trial_id for one in found.before} else "enters"


def what_if_table(found: WhatIf) -> Table:
    """The members of either front, cheapest first, at both prices."""
    old = {record.trial_id: record for record in found.trials}
    table = Table(box=None, pad_edge=False)
    for heading in ("", "arch_id", "architecture", "perplexity", "latency", "then", "sent", "then", "front"):
        table.add_column(
            heading,
            no_wrap=heading != "architecture",
            overflow="fold",
            justify="right" if heading in ("perplexity", "latency", "then", "sent") else "left",
        )
    for number, member in enumerate(found.shown, 1):
        before = old[member.trial_id]
        table.add_row(
            str(number),
            member.arch_id,
            member.notation + (" (baseline)" if member.role == "baseline" else ""),
            f"{member.perplexity:.2f}",
            *(format_seconds(one.latency_s) for one in (member, before)),
            *(format_bytes(one.sent_bytes) for one in (member, before)),
            _said(found, member),
        )
    return table


def what_if_lines(found: WhatIf) -> list[str]:
    """What is compared, and which picks survive."""
    lines = [
        f"then: {found.title_before}, within {format_budget(found.budget_before)} a token",
        f"now:  {found.title_after}, {_bounded(found.budget_after)}",
    ]
    if found.seq_len_after != found.seq_len_before:
        lines.append(
            f"note: perplexities are of T={found.seq_len_before}, at which all trials were trained, "
            f"not of T={found.seq_len_after}"
        )
    names = {one.trial_id for one in found.after}
    stay = sum(one.trial_id in names for one in found.before)
    lines.append(f"front: {stay} of {len(found.before)} members stay, {len(found.after) - stay} enter")
    if not found.after:
        cheapest = min(found.repriced, key=point)
        lines.append(
            f"no completed trial is within the budget; the cheapest, {cheapest.notation}, costs "
            f"{format_seconds(cheapest.latency_s)} and {format_bytes(cheapest.sent_bytes)}"
        )
        return lines
    return lines + _pick_lines(found)


def _pick_lines(found: WhatIf) -> list[str]:
    lines = []
    for choice in ("knee", "best"):
        before, after = (_picked(side, choice) for side in (found.before, found.after))
        same = "as then" if before and after.trial_id == before.trial_id else ""
        then = f"{before.arch_id} {before.notation} then" if before else "none then"
        lines.append(f"{choice}: {after.arch_id} {after.notation}, {same or then}")
    return lines


def _picked(members: Sequence[Record], choice: str) -> Record:
    points = [point(member) for member in members]
    return members[knee(points) if choice == "knee" else min(range(len(points)), key=lambda index: points[index][1])]


def _repriced(trials: Sequence[Record], space: SearchSpace, pricer: Pricer, seq_len: int) -> tuple[Record, ...]:
    table = price_table(price_space(space, pricer, seq_len))
    members = [parse(record.notation, space.base) for record in trials]
    prices = price_many(table, rows_of(table, members))
    return tuple(
        replace(
            record,
            protocol=pricer.protocol,
            network=pricer.network,
            cost_model_id=pricer.cost_model_id,
            rounds=None if prices.rounds is None else int(prices.rounds[row]),
            sent_bytes=prices.sent_bytes[row].item(),
            latency_s=prices.latency_s[row].item(),
            latency_s_range=None,
        )
        for row, record in enumerate(trials)
    )


def _with_range(record: Record, space: SearchSpace, pricer: Pricer, seq_len: int) -> Record:
    """Ranges are slow to find, so only what is shown has one."""
    graph = lower(parse(record.notation, space.base).architecture, seq_len)
    return replace(record, latency_s_range=pricer.latency_s_range(graph))


def _front(trials: Sequence[Record], budget: Budget) -> tuple[Record, ...]:
    """Of all trials within the budget, whatever their role, cheapest first."""
    inside = sorted((one for one in trials if _admits(budget, one)), key=point)
    kept = nondominated([point(one) for one in inside])
    return tuple(one for one, keep in zip(inside, kept, strict=True) if keep)


def _said(found: WhatIf, member: Record) -> str:
    """The fate, and of a dominated member by whom."""
    outcome = fate(found, member)
    if outcome != "dominated":
        return outcome
    better = next(one for one in found.after if dominates(point(one), point(member)))
    return f"dominated by {found.shown.index(better) + 1}"


def _admits(budget: Budget, record: Record) -> bool:
    return budget.admits(latency_s=record.latency_s, sent_bytes=record.sent_bytes)


def _setting(record: Record, seq_len: int) -> str:
    return f"{record.protocol}{f' on {record.network}' if record.network else ''}, T={seq_len}"


def _bounded(budget: Budget) -> str:
    return "no budget" if budget == Budget() else f"within {format_budget(budget)} a token"
