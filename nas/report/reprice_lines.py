"""A finished run under other prices, as a table and lines: what is compared, and which picks survive."""

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Budget
from nas.corpus.ngrams import NgramBaseline
from nas.report.ngram_lines import mark, ngram_lines
from nas.report.seed_words import perplexity_text
from nas.results.front import picked
from nas.results.members import TrainedMember
from nas.results.pareto import dominates
from nas.results.reprice import WhatIf, fate
from search_spaces.budget.feasible import format_budget


def what_if_table(found: WhatIf, ngrams: NgramBaseline | None = None) -> Table:
    """The members of either front, cheapest first, at both prices; a last column where some are above the trigram."""
    old = {record.trial_id: record for record in found.trials}
    table = Table(box=None, pad_edge=False)
    marks = [mark(member.mean_loss, ngrams) for member in found.shown]
    headings = ["", "arch_id", "architecture", "perplexity", "latency", "then", "sent", "then", "front"]
    for heading in headings + ["floor"] * any(marks):
        table.add_column(
            heading,
            no_wrap=heading != "architecture",
            overflow="fold",
            justify="right" if heading in ("perplexity", "latency", "then", "sent") else "left",
        )
    for number, (member, marked) in enumerate(zip(found.shown, marks, strict=True), 1):
        before = old[member.trial_id]
        table.add_row(
            str(number),
            member.arch_id,
            member.notation + (" (baseline)" if member.role == "baseline" else ""),
            perplexity_text(member),
            *(format_seconds(one.latency_s) for one in (member, before)),
            *(format_bytes(one.sent_bytes) for one in (member, before)),
            _describe_fate(found, member),
            *([marked] if any(marks) else []),
        )
    return table


def what_if_lines(found: WhatIf, ngrams: NgramBaseline | None = None) -> list[str]:
    """What is compared, and which picks survive."""
    lines = [
        f"then: {found.title_before}, within {format_budget(found.budget_before)} a token",
        f"now:  {found.title_after}, {_bounded(found.budget_after)}",
    ]
    trained, priced = found.workload_before.prompt_len, found.workload_after.prompt_len
    if priced != trained:
        lines.append(f"note: perplexities are of T={trained}, at which all trials were trained, not of T={priced}")
    lines += ngram_lines(ngrams)
    names = {one.trial_id for one in found.after}
    stay = sum(one.trial_id in names for one in found.before)
    lines.append(f"front: {stay} of {len(found.before)} members stay, {len(found.after) - stay} enter")
    if not found.after:
        cheapest = min(found.repriced, key=lambda one: one.point)
        lines.append(
            f"no completed trial is within the budget; the cheapest, {cheapest.notation}, costs "
            f"{format_seconds(cheapest.latency_s)} and {format_bytes(cheapest.sent_bytes)}"
        )
        return lines
    return lines + _pick_lines(found)


def _pick_lines(found: WhatIf) -> list[str]:
    lines = []
    for choice in ("knee", "best"):
        before, after = picked(found.before, choice) if found.before else None, picked(found.after, choice)
        same = "as then" if before and after.trial_id == before.trial_id else ""
        then = f"{before.arch_id} {before.notation} then" if before else "none then"
        lines.append(f"{choice}: {after.arch_id} {after.notation}, {same or then}")
    return lines


def _describe_fate(found: WhatIf, member: TrainedMember) -> str:
    """The fate, and of a dominated member by whom."""
    outcome = fate(found, member)
    if outcome != "dominated":
        return outcome
    better = next(one for one in found.after if dominates(one.point, member.point))
    return f"dominated by {found.shown.index(better) + 1}"


def _bounded(budget: Budget) -> str:
    return "no budget" if budget == Budget() else f"within {format_budget(budget)} a token"
