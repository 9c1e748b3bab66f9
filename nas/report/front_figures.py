"""Data of the perplexity-latency figures: what a run found, and what of it stays under other prices. No drawing."""

from collections.abc import Sequence
from typing import NamedTuple

from costmodel.cost import Budget
from costmodel.protocols.published_rows import PublishedRow
from nas.corpus.ngrams import NgramFloors
from nas.results import ledger
from nas.results.front import front
from nas.results.ledger import Record
from nas.results.reprice import WhatIf

PRIOR_RANGE_SHARE = 0.005  # a latency range narrower than this share of the latency is no wider than its marker
LONGEST_NAME = 24  # characters of a label
DRAWN_FLOORS = ("trigram", "5-gram")  # always; and these where the trials are:
DRAWN_IF_INSIDE = ("unigram", "bigram")


class Group(NamedTuple):
    """Trials drawn alike. latency_min: minutes; half-open price range in minutes per trial, or None."""

    names: tuple[str, ...]
    latency_min: tuple[float, ...]
    perplexity: tuple[float, ...]
    range_min: tuple[tuple[float, float] | None, ...]


class FloorLines(NamedTuple):
    """What n-gram models of the same tokens reach; no names for a run from before there were floors."""

    title: str
    names: tuple[str, ...]
    perplexity: tuple[float, ...]


NO_FLOORS = FloorLines(title="", names=(), perplexity=())


class FrontFigure(NamedTuple):
    """Everything the Pareto plot shows."""

    title: str
    budget_min: float
    front: Group
    dominated: Group
    baselines: Group
    stopped_min: tuple[float, ...]
    diverged_min: tuple[float, ...]
    published: Group
    published_title: str
    floors: FloorLines = NO_FLOORS


class WhatIfPanel(NamedTuple):
    """One set of prices. kept: on both fronts; gone: on the first alone; new: on the second alone; others: on none."""

    title: str
    budget_min: float | None
    front_min: tuple[float, ...]
    front_perplexity: tuple[float, ...]
    kept: Group
    gone: Group
    new: Group
    others: Group


class WhatIfFigure(NamedTuple):
    """The same trials under two sets of prices; a trial has the same number in both."""

    title: str
    before: WhatIfPanel
    after: WhatIfPanel
    floors: FloorLines = NO_FLOORS


def front_figure(
    records: Sequence[Record],
    budget: Budget,
    rows: Sequence[PublishedRow],
    *,
    num_layers: int,
    seq_len: int,
    floors: NgramFloors | None = None,
) -> FrontFigure:
    """The data of the Pareto plot of a ledger."""
    assert budget.latency_s is not None
    members = front(records, budget)
    done = ledger.completed(records)
    on_front = {record.trial_id for record in members}
    candidates = [one for one in done if one.role == "candidate" and one.trial_id not in on_front]
    ended = [one for one in ledger.finished(records) if one.role == "candidate"]
    same = [
        row for row in rows if (row.num_layers, row.seq_len) == (num_layers, seq_len) and row.perplexity is not None
    ]
    return FrontFigure(
        title=title(done),
        budget_min=budget.latency_s / 60,
        front=_group(members),
        dominated=_group(candidates),
        baselines=_group([one for one in done if one.role == "baseline"]),
        stopped_min=tuple(one.latency_s / 60 for one in ended if one.status == "stopped"),
        diverged_min=tuple(one.latency_s / 60 for one in ended if one.status == "diverged"),
        published=Group(
            names=tuple(row.notation for row in same),
            latency_min=tuple(row.latency_s / 60 for row in same),
            perplexity=tuple(row.perplexity for row in same if row.perplexity is not None),
            range_min=(None,) * len(same),
        ),
        published_title=f"Papers' rows, L={num_layers}, T={seq_len}\n(full scale, other corpus and tokenizer)",
        floors=drawn_floors(floors, done),
    )


def what_if_figure(found: WhatIf, floors: NgramFloors | None = None) -> WhatIfFigure:
    """The data of the plot of a re-priced run."""
    return WhatIfFigure(
        title=title(found.trials),
        before=_panel(found, found.trials, found.before, found.budget_before, f"as searched: {found.title_before}"),
        after=_panel(found, found.repriced, found.after, found.budget_after, f"re-priced: {found.title_after}"),
        floors=drawn_floors(floors, found.trials),
    )


def drawn_floors(floors: NgramFloors | None, done: Sequence[Record]) -> FloorLines:
    """The floors to draw beside these trials: those of `DRAWN_FLOORS`, and the low orders that are among them."""
    if floors is None:
        return NO_FLOORS
    known = floors.perplexities
    drawn = [one.perplexity for one in done if one.perplexity is not None] + [known[name] for name in DRAWN_FLOORS]
    inside = [name for name in DRAWN_IF_INSIDE if min(drawn) <= known[name] <= max(drawn)]
    names = (*inside, *DRAWN_FLOORS)
    return FloorLines(
        title=f"n-gram models of {floors.tokens:,} tokens",
        names=names,
        perplexity=tuple(known[name] for name in names),
    )


def title(done: Sequence[Record]) -> str:
    """The scale and tokens behind the points."""
    scales = sorted({f"scale {one.scale}, width {one.width}, {one.tokens:,} tokens" for one in done})
    corpora = sorted({f"{one.tokenizer}, {one.split}" for one in done})
    return "; ".join(scales) + "\n" + "; ".join(corpora)


def label(record: Record) -> str:
    """The papers' name, or the arch_id where the placement is too long for a label."""
    return record.notation if len(record.notation) <= LONGEST_NAME else record.arch_id


def _panel(
    found: WhatIf, trials: Sequence[Record], members: Sequence[Record], budget: Budget, title: str
) -> WhatIfPanel:
    first, second = ({record.trial_id for record in side} for side in (found.before, found.after))
    numbers = {record.trial_id: str(number) for number, record in enumerate(found.shown, 1)}

    def group(chosen: set[str]) -> Group:
        drawn = [record for record in trials if record.trial_id in chosen]
        names = tuple(numbers.get(record.trial_id, "") for record in drawn)
        return _group(drawn)._replace(names=names)

    return WhatIfPanel(
        title=title,
        budget_min=None if budget.latency_s is None else budget.latency_s / 60,
        front_min=tuple(record.latency_s / 60 for record in members),
        front_perplexity=tuple(record.perplexity or 0.0 for record in members),
        kept=group(first & second),
        gone=group(first - second),
        new=group(second - first),
        others=group({record.trial_id for record in trials} - first - second),
    )


def _group(records: Sequence[Record]) -> Group:
    return Group(
        names=tuple(label(record) for record in records),
        latency_min=tuple(record.latency_s / 60 for record in records),
        perplexity=tuple(record.perplexity or 0.0 for record in records),
        range_min=tuple(_range_min(record) for record in records),
    )


def _range_min(record: Record) -> tuple[float, float] | None:
    if record.latency_s_range is None:
        return None
    low, high = record.latency_s_range
    return (low / 60, high / 60) if high - low > PRIOR_RANGE_SHARE * record.latency_s else None
