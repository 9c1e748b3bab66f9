"""A finished run under other prices: protocol, network, testbed, prompt or budget. Nothing is trained again.

Every completed trial is priced anew, baselines too, which other prices may make worth having; perplexities are those
of the run, means over seeds, trained at its own sequence length. The front is recomputed, its members before and after
compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from costmodel.cost import Budget, shared_price, total_price
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from nas.results import ledger
from nas.results.front import front, front_of, is_eligible
from nas.results.ledger import Record, deployed_of
from nas.results.members import TrainedMember, members
from search_spaces.architecture import Architecture
from search_spaces.pricing import price_architecture
from search_spaces.workload import Workload

Fate = Literal["stays", "enters", "over budget", "dominated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The trained members of a run, at their prices of then and at others.

    trials, repriced: the same members in the same order. before, after: the two fronts, cheapest first.
    workload_before, workload_after: what is priced; all trials were trained at the length of the first one's prompt.
    """

    trials: tuple[TrainedMember, ...]
    repriced: tuple[TrainedMember, ...]
    before: tuple[TrainedMember, ...]
    after: tuple[TrainedMember, ...]
    budget_before: Budget
    budget_after: Budget
    workload_before: Workload
    workload_after: Workload

    @property
    def shown(self) -> tuple[TrainedMember, ...]:
        """The re-priced members of either front, cheapest first."""
        names = {member.trial_id for member in (*self.before, *self.after)}
        return tuple(sorted((one for one in self.repriced if one.trial_id in names), key=lambda one: one.point))

    @property
    def title_before(self) -> str:
        return _setting(self.trials[0], self.workload_before)

    @property
    def title_after(self) -> str:
        return _setting(self.repriced[0], self.workload_after)


def what_if(
    records: Sequence[Record],
    base: Architecture,
    pricer: Pricer,
    *,
    workloads: tuple[Workload, Workload],
    budgets: tuple[Budget, Budget],
) -> WhatIf:
    """A run's ledger under another pricer. base: of the run's space. workloads, budgets: (of the run, to price for).

    Raises UserError if no trial is completed, the base cannot take the workload, or an op has no price.
    """
    if not ledger.completed(records):
        raise UserError("the run has no completed trial yet, so there is nothing to price anew.")
    repriced = _repriced(ledger.finished(records), base, pricer, workloads[1])
    before, after = front(records, budgets[0]), front_of(members(repriced), budgets[1])
    names = {member.candidate_id for member in (*before, *after)}
    shown = {member.most_expensive.trial_id for member in members(repriced) if member.candidate_id in names}
    ranged = members(_with_range(one, base, pricer, workloads[1]) if one.trial_id in shown else one for one in repriced)
    return WhatIf(
        trials=members(records),
        repriced=ranged,
        before=before,
        after=front_of(ranged, budgets[1]),
        budget_before=budgets[0],
        budget_after=budgets[1],
        workload_before=workloads[0],
        workload_after=workloads[1],
    )


def fate(found: WhatIf, member: TrainedMember) -> Fate:
    """What became of a re-priced member of either front."""
    if member not in found.after:
        return "dominated" if is_eligible(member, found.budget_after) else "over budget"
    return "stays" if member.trial_id in {one.trial_id for one in found.before} else "enters"


def _repriced(trials: Sequence[Record], base: Architecture, pricer: Pricer, workload: Workload) -> tuple[Record, ...]:
    """The completed of these trials at other prices, the rest as they are."""
    price_op = cache(pricer.price)

    def at_other_prices(record: Record) -> Record:
        graphs = workload.graphs(deployed_of(record, base))
        price = shared_price(total_price(price_op(node.op) for graph in graphs for node in graph), workload.new_tokens)
        return replace(
            record,
            protocol=pricer.protocol,
            network=pricer.network,
            cost_model_id=pricer.cost_model_id,
            rounds=price.rounds,
            sent_bytes=price.sent_bytes,
            latency_s=price.latency_s,
            latency_s_range=None,
        )

    return tuple(at_other_prices(record) if record.status == "completed" else record for record in trials)


def _with_range(record: Record, base: Architecture, pricer: Pricer, workload: Workload) -> Record:
    """Ranges are slow to find, so only what is shown has one."""
    priced = price_architecture(deployed_of(record, base), pricer, workload, "written")
    return replace(record, latency_s_range=priced.latency_s_range)


def _setting(member: TrainedMember, workload: Workload) -> str:
    record = member.first
    return f"{record.protocol}{f' on {record.network}' if record.network else ''}, {workload.words}"
