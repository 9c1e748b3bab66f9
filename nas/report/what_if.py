"""A run under another protocol, network, testbed, prompt or budget, as data, as a table and as lines of text.

Nothing is trained again. Costs of all completed trials and the front are computed again; perplexities stay those of the
run, at its own sequence length.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds, parse_budget
from costmodel.cost import Budget, shared_price, total_price
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.protocols import load_pricer
from nas.report.summary import mark, ngram_lines, perplexity_text
from nas.run.folder import run_pricer
from nas.run.ledger import Record, deployed_of, price_columns
from nas.run.members import TrainedMember, front_of, is_eligible, members, picked
from nas.run.pareto import dominates
from nas.run.run import Run
from search_spaces.budget.feasible import format_budget
from search_spaces.budget.options import BudgetOptions
from search_spaces.budget.priced_space import price_architecture
from search_spaces.lower import Workload

Status = Literal["stays", "enters", "over budget", "dominated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The trained members of a run at other costs, and their front.

    repriced: all members, baselines too, with the other costs, in the order of the run. after: the front of these
        members, cheapest first. pricer, workload, budget: protocol, prompt and budget of the other costs.
    """

    run: Run
    repriced: tuple[TrainedMember, ...]
    after: tuple[TrainedMember, ...]
    pricer: Pricer
    workload: Workload
    budget: Budget

    @property
    def shown(self) -> tuple[TrainedMember, ...]:
        """The members of the run's front or the new front, with the other costs, cheapest first."""
        names = {member.trial_id for member in (*self.run.front, *self.after)}
        shown = (member for member in self.repriced if member.trial_id in names)
        return tuple(sorted(shown, key=lambda member: member.point))

    def status(self, member: TrainedMember) -> Status:
        """Return what becomes of a repriced member of either front. It is `over budget` if it is not `is_eligible`."""
        if member not in self.after:
            return "dominated" if is_eligible(member, self.budget) else "over budget"
        return "stays" if member.trial_id in {kept.trial_id for kept in self.run.front} else "enters"


def reprice(run: Run, *, protocol: str | None = None, seq_len: int | None = None, **options: Any) -> WhatIf:
    """Return a run's trained members at other costs.

    Args:
        run: any run with a completed trial.
        protocol: published, semi2k, aby3, cheetah, sigma, crypten, ckks or module:Class; None for the run's first.
        seq_len: tokens of the prompt; None for the run's.
        options: `network` and `testbed`, by default the run's if it has the protocol; and budgets, by default none.

    Raises:
        UserError: if no trial is completed, an op has no cost, the prompt exceeds the context, or an option has an
            unknown value or excludes another.
    """
    if protocol is not None and "," in protocol:
        raise UserError(f"--protocol must be one protocol here, but got {protocol}; give one at a time.")
    config = run.config
    given = BudgetOptions(protocol=protocol or config.protocols[0], **options)
    budget = parse_budget(given.budget_latency, given.budget_comm, given.budget_keys)
    if protocol is None or protocol in config.protocols:
        pricer = run_pricer(run.folder, config, given.protocol, given.network, given.testbed)
    else:
        pricer = load_pricer(protocol, given.network, given.testbed, config.setting_of(protocol))
    workload = run.workload if seq_len is None else replace(run.workload, prompt_len=seq_len)
    return what_if(run, pricer, workload, budget)


def what_if(run: Run, pricer: Pricer, workload: Workload, budget: Budget) -> WhatIf:
    """Return a run's trained members at the costs of a pricer and a workload, and their front within a budget.

    Raises UserError if no trial is completed, the workload exceeds the context, an op has no cost, or the budget bounds
    keys but the protocol has none.
    """
    budget.check_keys(pricer.protocol, has_keys=pricer.has_keys)
    if not run.completed:
        raise UserError("the run has no completed trial yet, so there is nothing to price anew.")
    price_op = cache(pricer.price)

    def at_other_prices(record: Record) -> Record:
        graphs = workload.graphs(deployed_of(record, run.base))
        price = shared_price(total_price(price_op(node.op) for graph in graphs for node in graph), workload.new_tokens)
        return replace(record, **price_columns(pricer, price), latency_s_range=None)

    repriced = [at_other_prices(record) if record.status == "completed" else record for record in run.finished]
    trained = members(repriced)
    names = {member.candidate_id for member in (*run.front, *front_of(trained, budget))}
    shown = {member.most_expensive.trial_id for member in trained if member.candidate_id in names}

    def ranged(record: Record) -> Record:  # ranges are slow to compute, so only members that are shown have one
        priced = price_architecture(deployed_of(record, run.base), pricer, workload, "unfolded")
        return replace(record, latency_s_range=priced.latency_s_range)

    candidates = members(ranged(record) if record.trial_id in shown else record for record in repriced)
    after = front_of(candidates, budget)
    return WhatIf(run=run, repriced=candidates, after=after, pricer=pricer, workload=workload, budget=budget)


def what_if_table(what_if: WhatIf) -> Table:
    """Return a table of the members of the old and the new front, cheapest first, with new and old (`then`) costs."""
    old = {member.trial_id: member for member in what_if.run.members}
    table = Table(box=None, pad_edge=False)
    marks = [mark(member.val_loss, what_if.run.ngrams) for member in what_if.shown]
    headings = ["", "arch_id", "architecture", "perplexity", "latency", "then", "sent", "then", "front"]
    for heading in headings + ["floor"] * any(marks):
        table.add_column(
            heading,
            no_wrap=heading != "architecture",
            overflow="fold",
            justify="right" if heading in ("perplexity", "latency", "then", "sent") else "left",
        )
    for number, (member, marked) in enumerate(zip(what_if.shown, marks, strict=True), 1):
        before, status = old[member.trial_id], str(what_if.status(member))
        if status == "dominated":
            better = next(other for other in what_if.after if dominates(other.point, member.point))
            status = f"dominated by {what_if.shown.index(better) + 1}"
        table.add_row(
            str(number),
            member.arch_id,
            member.notation + (" (baseline)" if member.role == "baseline" else ""),
            perplexity_text(member),
            *(format_seconds(priced.latency_s) for priced in (member, before)),
            *(format_bytes(priced.sent_bytes) for priced in (member, before)),
            status,
            *([marked] if any(marks) else []),
        )
    return table


def what_if_lines(what_if: WhatIf) -> list[str]:
    """Return lines on the old and the new setting, and on how the front, its knee and its best member change."""
    before, after = what_if.run.front, what_if.after

    def setting(trial: Record, workload: Workload) -> str:
        return f"{trial.protocol}{f' on {trial.network}' if trial.network else ''}, {workload.words}"

    then = setting(what_if.run.members[0].first, what_if.run.workload)
    now = setting(what_if.repriced[0].first, what_if.workload)
    bounded = "no budget" if what_if.budget == Budget() else f"within {format_budget(what_if.budget)} per token"
    lines = [
        f"then: {then}, within {format_budget(what_if.run.budget)} per token",
        f"now:  {now}, {bounded}",
    ]
    trained, priced = what_if.run.config.sequence_len, what_if.workload.prompt_len
    if priced != trained:
        lines.append(f"note: perplexities are of T={trained}, at which all trials were trained, not of T={priced}")
    lines += ngram_lines(what_if.run.ngrams)
    names = {member.trial_id for member in after}
    stay = sum(member.trial_id in names for member in before)
    lines.append(f"front: {stay} of {len(before)} members stay, {len(after) - stay} enter")
    if not after:
        cheapest = min(what_if.repriced, key=lambda member: member.point)
        lines.append(
            f"no completed trial is within the budget; the cheapest, {cheapest.notation}, costs "
            f"{format_seconds(cheapest.latency_s)} and {format_bytes(cheapest.sent_bytes)}"
        )
        return lines
    for choice in ("knee", "best"):
        pick, former = picked(after, choice), picked(before, choice) if before else None
        same = "as then" if former and pick.trial_id == former.trial_id else ""
        other = f"{former.arch_id} {former.notation} then" if former else "none then"
        lines.append(f"{choice}: {pick.arch_id} {pick.notation}, {same or other}")
    return lines
