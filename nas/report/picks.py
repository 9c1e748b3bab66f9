"""A finished run under several protocols: what each member costs and is under each, and what another's pick loses."""

from collections.abc import Sequence

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from nas.report.summary import perplexity_text
from nas.run.front import is_eligible, picked
from nas.run.members import TrainedMember
from nas.run.reprice import WhatIf

PICKS = ("knee", "best")


def picks_table(what_ifs: Sequence[WhatIf]) -> Table:
    """Members of any front, cheapest first under the first prices: their cost, and what they are, under each."""
    names = {member.trial_id for what_if in what_ifs for member in what_if.after}
    columns = [[one for one in what_if.repriced if one.trial_id in names] for what_if in what_ifs]
    table = Table(box=None, pad_edge=False)
    for heading in ("arch_id", "architecture", "perplexity", *(what_if.title_after for what_if in what_ifs)):
        table.add_column(heading, no_wrap=heading == "arch_id", overflow="fold")
    for row in sorted(zip(*columns, strict=True), key=lambda row: row[0].point):
        cells = (_cell(what_if, member) for what_if, member in zip(what_ifs, row, strict=True))
        table.add_row(row[0].arch_id, row[0].notation, perplexity_text(row[0]), *cells)
    return table


def loss_lines(what_ifs: Sequence[WhatIf]) -> list[str]:
    """Of each pick under each other protocol: how much more it costs than the cheapest that is as good there."""
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
