"""The answer: which model for this budget, and what stands beside it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from costmodel.config.units import format_bytes, format_seconds
from nas.report.html.grid import Setting
from nas.report.html.placements import kept_words
from nas.report.html.points import Point
from nas.report.summary import IN_NOISE, against_parent, also_texts, mark, noise_marks, perplexity_text
from nas.run.front import crosses, picked
from nas.run.ledger import architecture_of
from nas.run.members import TrainedMember, verdict
from nas.run.run import Run

DRAWN_NGRAMS = ("5-gram", "trigram")  # orders that are worth a row

# kind of a row -> what is said beside its name; of several, the first
NOTES = {"pick": "the pick", "parent": "the parent", "trained": "trained here", "paper": "", "n-gram": "n-gram"}
RANKED = {"parent": "parent", "paper": "paper"}

_Priced: TypeAlias = tuple[Point, tuple[float | None, ...]]


class Row(NamedTuple):
    """One model beside the pick. kind: pick, parent, trained, paper or n-gram; what a column does not have is empty."""

    kind: str
    name: str
    note: str
    price: str
    sent: str
    printed_price: str
    here: str
    printed: str


def answer_of(run: Run) -> dict[str, Any] | None:
    """The pick in words: the member of the front of lowest perplexity; None if the front is empty.

    place: of its point. verdicts: what is known of it, most important first.
    """
    if not run.front:
        return None
    best = run.front[-1]
    perplexity, _, seeds = perplexity_text(best).partition(" (")
    return {
        "place": len(run.front) - 1,
        "name": best.notation,
        "runs_as": best.deployed or best.first.placement,
        "keeps": kept_words(architecture_of(best.first, run.base), run.config.accounting),
        "price": format_seconds(best.latency_s),
        "sent": format_bytes(best.sent_bytes),
        "perplexity": perplexity,
        "seeds": seeds.removesuffix(")"),
        "verdicts": _verdicts(run, best),
        "cheaper": _cheaper(run, best),
    }


def rows_beside(run: Run, points: Sequence[Point], setting: Setting) -> list[Row]:
    """The pick among the parent, what was trained for comparison, the papers' ladder and n-grams, most expensive first.

    A row of the papers that this run has trained, or started from, is one row.
    """
    papers = {point.name for point in points if point.role == "paper"}
    pick = points[len(run.front) - 1] if run.front else None
    by_name: dict[str, list[_Priced]] = {}
    for point, totals in sorted(zip(points, setting.totals, strict=True), key=lambda priced: -(priced[1][0] or 0.0)):
        if point is pick or point.name in papers or point.role in ("baseline", "parent"):
            by_name.setdefault(point.name, []).append((point, totals))
    rows = [_row(group, pick) for group in by_name.values()]
    known = {} if run.ngrams is None else run.ngrams.perplexities
    return rows + [
        Row("n-gram", name, NOTES["n-gram"], "", "", "", f"{known[name]:.2f}", "") for name in DRAWN_NGRAMS if known
    ]


def marks_of(run: Run) -> list[str]:
    """Says of each member of the front what speaks against it."""
    marks = []
    for member, noise in zip(run.front, noise_marks(run.front), strict=True):
        price = "its price range crosses the budget" if crosses(member, run.budget) else ""
        marks.append("; ".join(filter(None, (mark(member.mean_loss, run.ngrams), noise, price))))
    return marks


def _row(group: Sequence[_Priced], pick: Point | None) -> Row:
    """Points of one name are one row: the pick before the parent, that before others trained here, then the papers'."""
    kinds = ["pick" if point is pick else RANKED.get(point.role, "trained") for point, _ in group]
    kind, (first, totals) = min(zip(kinds, group, strict=True), key=lambda pair: list(NOTES).index(pair[0]))
    paper = next((point for point, _ in group if point.role == "paper"), None)
    latency_s, sent_bytes = totals[0], totals[1]
    assert latency_s is not None
    assert sent_bytes is not None
    return Row(
        kind=kind,
        name=first.name,
        note=NOTES[kind],
        price=format_seconds(latency_s),
        sent=format_bytes(sent_bytes),
        printed_price="" if paper is None or paper.printed_s is None else format_seconds(paper.printed_s),
        here="" if first is paper else _perplexity(first),
        printed="" if paper is None else "diverged" if paper.printed is None else f"{paper.printed:.2f}",
    )


def _perplexity(point: Point) -> str:
    return f"{point.perplexity:.2f}" if point.member is None else perplexity_text(point.member).partition(" (")[0]


def _verdicts(run: Run, best: TrainedMember) -> list[str]:
    keys = [] if best.key_bytes is None else [f"{format_bytes(best.key_bytes)} of keys a token"]
    lines = [*keys, *also_texts(best)]
    if run.parent is not None:
        lines.append(f"against its parent {against_parent(run.parent, best)}")
    if run.ngrams is not None:
        floor = run.ngrams.perplexities[DRAWN_NGRAMS[0]]
        word = "better" if best.perplexity < floor else "worse"
        lines.append(f"{word} than the {DRAWN_NGRAMS[0]} ({floor:.1f})")
    lines.append(_against_neighbour(run, best))
    if crosses(best, run.budget) and best.latency_s_range is not None:
        low, high = best.latency_s_range
        lines.append(f"price range {format_seconds(low)} to {format_seconds(high)} crosses the budget")
    return [line for line in lines if line]


def _against_neighbour(run: Run, best: TrainedMember) -> str:
    place = run.front.index(best)
    if place == 0:
        return ""
    tested = verdict(best, run.front[place - 1])
    if tested == "not tested":
        return "one seed, so no difference to other members is shown"
    return "better than its cheaper neighbour beyond noise" if tested == "better" else IN_NOISE


def _cheaper(run: Run, best: TrainedMember) -> str:
    """The knee, where it is another member."""
    place = run.front.index(picked(run.front, "knee"))
    member = run.front[place]
    if member is best:
        return ""
    known = mark(member.mean_loss, run.ngrams)
    return (
        f"{member.notation} (no. {place + 1}): {format_seconds(member.latency_s)}, "
        f"perplexity {perplexity_text(member)}{known and f', {known}'}"
    )
