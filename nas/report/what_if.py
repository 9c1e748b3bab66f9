"""A finished run at other costs, as tables and lines: the comparison, and which picks survive. With several protocols:
the cost and status of each member under each, and what the pick of one protocol loses under another.
"""

from collections.abc import Sequence

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Budget
from nas.report.summary import mark, ngram_lines, perplexity_text
from nas.run.front import is_eligible, picked
from nas.run.members import TrainedMember
from nas.run.pareto import dominates
from nas.run.reprice import WhatIf
from search_spaces.budget.feasible import format_budget

PICKS = ("knee", "best")


def what_if_table(what_if: WhatIf) -> Table:
    """Return a table of the members of either front, cheapest first, at both costs."""
    old = {member.trial_id: member for member in what_if.run.members}
    table = Table(box=None, pad_edge=False)
    marks = [mark(member.mean_loss, what_if.run.ngrams) for member in what_if.shown]
    headings = ["", "arch_id", "architecture", "perplexity", "latency", "then", "sent", "then", "front"]
    for heading in headings + ["floor"] * any(marks):
        table.add_column(
            heading,
            no_wrap=heading != "architecture",
            overflow="fold",
            justify="right" if heading in ("perplexity", "latency", "then", "sent") else "left",
        )
    for number, (member, marked) in enumerate(zip(what_if.shown, marks, strict=True), 1):
        before = old[member.trial_id]
        table.add_row(
            str(number),
            member.arch_id,
            member.notation + (" (baseline)" if member.role == "baseline" else ""),
            perplexity_text(member),
            *(format_seconds(priced.latency_s) for priced in (member, before)),
            *(format_bytes(priced.sent_bytes) for priced in (member, before)),
            _status_text(what_if, member),
            *([marked] if any(marks) else []),
        )
    return table


def what_if_lines(what_if: WhatIf) -> list[str]:
    """Describe the comparison, and which picks survive."""
    before, after = what_if.before, what_if.after
    lines = [
        f"then: {what_if.title_before}, within {format_budget(what_if.run.budget)} per token",
        f"now:  {what_if.title_after}, {_bounded(what_if.budget)}",
    ]
    trained, priced = what_if.run.seq_len, what_if.workload.prompt_len
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
    return lines + _pick_lines(what_if)


def _pick_lines(what_if: WhatIf) -> list[str]:
    lines = []
    for choice in PICKS:
        before = picked(what_if.before, choice) if what_if.before else None
        after = picked(what_if.after, choice)
        same = "as then" if before and after.trial_id == before.trial_id else ""
        then = f"{before.arch_id} {before.notation} then" if before else "none then"
        lines.append(f"{choice}: {after.arch_id} {after.notation}, {same or then}")
    return lines


def _status_text(what_if: WhatIf, member: TrainedMember) -> str:
    status = what_if.status(member)
    if status != "dominated":
        return status
    better = next(other for other in what_if.after if dominates(other.point, member.point))
    return f"dominated by {what_if.shown.index(better) + 1}"


def _bounded(budget: Budget) -> str:
    return "no budget" if budget == Budget() else f"within {format_budget(budget)} per token"


def picks_table(what_ifs: Sequence[WhatIf]) -> Table:
    """Return a table of the members of any front, cheapest first, with cost and status under each protocol."""
    names = {member.trial_id for what_if in what_ifs for member in what_if.after}
    columns = [[member for member in what_if.repriced if member.trial_id in names] for what_if in what_ifs]
    table = Table(box=None, pad_edge=False)
    for heading in ("arch_id", "architecture", "perplexity", *(what_if.title_after for what_if in what_ifs)):
        table.add_column(heading, no_wrap=heading == "arch_id", overflow="fold")
    for row in sorted(zip(*columns, strict=True), key=lambda row: row[0].point):
        cells = (_cell(what_if, member) for what_if, member in zip(what_ifs, row, strict=True))
        table.add_row(row[0].arch_id, row[0].notation, perplexity_text(row[0]), *cells)
    return table


def loss_lines(what_ifs: Sequence[WhatIf]) -> list[str]:
    """Describe how much more each pick costs under each other protocol than the cheapest member that is as good."""
    return [
        f"{choice} of {chosen.title_after}, under {paid.title_after}: {_loss(paid, picked(chosen.after, choice))}"
        for choice in PICKS
        for chosen in what_ifs
        for paid in what_ifs
        if chosen is not paid and chosen.after
    ]


def _cell(what_if: WhatIf, member: TrainedMember) -> str:
    keys = "" if member.key_bytes is None else f", {format_bytes(member.key_bytes)} of keys"
    return f"{format_seconds(member.latency_s)}{keys}: {', '.join(_words(what_if, member))}"


def _words(what_if: WhatIf, member: TrainedMember) -> list[str]:
    if member not in what_if.after:
        return ["dominated" if is_eligible(member, what_if.budget) else "over budget"]
    return ["front", *(choice for choice in PICKS if picked(what_if.after, choice) == member)]


def _loss(paid: WhatIf, pick: TrainedMember) -> str:
    there = next(member for member in paid.repriced if member.trial_id == pick.trial_id)
    if not is_eligible(there, paid.budget):
        return f"{there.arch_id} is over budget"
    best = next(member for member in paid.after if member.mean_loss <= there.mean_loss)  # cheapest first
    more = there.latency_s / best.latency_s - 1
    return (
        f"{there.arch_id} costs {more:.1%} more than {best.arch_id}" if more else f"{there.arch_id} is as good as any"
    )
