"""A finished run under other prices: protocol, network, testbed, prompt or budget. Nothing is trained again.

Every completed trial is priced anew, baselines too, which other prices may make worth having; perplexities are
those of the run, trained at its own sequence length. The front is recomputed, its members before and after compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from costmodel.cost import Budget, total_price
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from nas.results import ledger
from nas.results.front import admits, front, point
from nas.results.ledger import Record, deployed_of
from nas.results.pareto import nondominated
from search_spaces.architecture import Architecture
from search_spaces.lower import lower

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
    base: Architecture,
    pricer: Pricer,
    *,
    seq_lens: tuple[int, int],
    budgets: tuple[Budget, Budget],
) -> WhatIf:
    """A run's ledger under another pricer. base: of the run's space. seq_lens, budgets: (of the run, to price for).

    Raises UserError if no trial is completed, the base cannot take the sequence length, or an op has no price.
    """
    trials = ledger.completed(records)
    if not trials:
        raise UserError("the run has no completed trial yet, so there is nothing to price anew.")
    repriced = _repriced(trials, base, pricer, seq_lens[1])
    before, after = front(records, budgets[0]), _front(repriced, budgets[1])
    names = {record.trial_id for record in (*before, *after)}
    repriced = tuple(_with_range(one, base, pricer, seq_lens[1]) if one.trial_id in names else one for one in repriced)
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
        return "dominated" if admits(found.budget_after, member) else "over budget"
    return "stays" if member.trial_id in {one.trial_id for one in found.before} else "enters"


def _repriced(trials: Sequence[Record], base: Architecture, pricer: Pricer, seq_len: int) -> tuple[Record, ...]:
    price_op = cache(pricer.price)
    prices = [total_price(price_op(node.op) for node in lower(deployed_of(one, base), seq_len)) for one in trials]
    return tuple(
        replace(
            record,
            protocol=pricer.protocol,
            network=pricer.network,
            cost_model_id=pricer.cost_model_id,
            rounds=price.rounds,
            sent_bytes=price.sent_bytes,
            latency_s=price.latency_s,
            latency_s_range=None,
        )
        for record, price in zip(trials, prices, strict=True)
    )


def _with_range(record: Record, base: Architecture, pricer: Pricer, seq_len: int) -> Record:
    """Ranges are slow to find, so only what is shown has one."""
    graph = lower(deployed_of(record, base), seq_len)
    return replace(record, latency_s_range=pricer.latency_s_range(graph))


def _front(trials: Sequence[Record], budget: Budget) -> tuple[Record, ...]:
    """The front of all trials within the budget, whatever their role, cheapest first."""
    inside = sorted((one for one in trials if admits(budget, one)), key=point)
    kept = nondominated([point(one) for one in inside])
    return tuple(one for one, keep in zip(inside, kept, strict=True) if keep)


def _setting(record: Record, seq_len: int) -> str:
    return f"{record.protocol}{f' on {record.network}' if record.network else ''}, T={seq_len}"
