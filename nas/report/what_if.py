"""A finished run at other costs, as a table and lines: the comparison, and which picks survive."""

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Budget
from nas.report.summary import mark, ngram_lines, perplexity_text
from nas.run.members import picked
from nas.run.pareto import dominates
from nas.run.reprice import WhatIf
from search_spaces.budget.feasible import format_budget


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
    """Describe the comparison, and which picks survive."""
    before, after = what_if.before, what_if.after
    bounded = "no budget" if what_if.budget == Budget() else f"within {format_budget(what_if.budget)} per token"
    lines = [
        f"then: {what_if.title_before}, within {format_budget(what_if.run.budget)} per token",
        f"now:  {what_if.title_after}, {bounded}",
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
    for choice in ("knee", "best"):
        pick, former = picked(after, choice), picked(before, choice) if before else None
        same = "as then" if former and pick.trial_id == former.trial_id else ""
        then = f"{former.arch_id} {former.notation} then" if former else "none then"
        lines.append(f"{choice}: {pick.arch_id} {pick.notation}, {same or then}")
    return lines
