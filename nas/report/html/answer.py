"""The answer of a report: the best model for the budget, and models to compare it with."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from costmodel.config.units import format_bytes, format_seconds
from costmodel.protocols.published import PublishedRow, held_out_rows, published_rows
from nas.report.html.placements import kept_words
from nas.report.summary import IN_NOISE, against_parent, agreement_text, also_texts, mark, noise_marks, perplexity_text
from nas.run.front import crosses, picked
from nas.run.ledger import architecture_of
from nas.run.members import TrainedMember, verdict
from nas.run.run import Run
from search_spaces.budget.priced_space import price_architecture
from search_spaces.notation import parse

DRAWN_NGRAMS = ("5-gram", "trigram")  # orders with a row of their own

# kind of a row -> note beside its name; of rows with the same name, the first kind in this order is shown
NOTES = {"pick": "the pick", "parent": "the parent", "trained": "trained here", "paper": "", "n-gram": "n-gram"}


class Row(NamedTuple):
    """One model in the comparison.

    kind: a key of NOTES. paper: its row in the papers, or None. latency_s, sent_bytes: None for n-grams. here: its
        perplexity in this run; empty without one.
    """

    kind: str
    name: str
    latency_s: float | None
    sent_bytes: float | None
    here: str
    paper: PublishedRow | None = None

    @property
    def note(self) -> str:
        return NOTES[self.kind]


def answer_of(run: Run) -> dict[str, Any]:
    """Describe the pick, the member of the front with the lowest perplexity.

    verdicts: statements about it, most important first.
    """
    best = run.front[-1]
    return {
        "keeps": kept_words(architecture_of(best.first, run.base), run.config.cost_of),
        "verdicts": _verdicts(run, best),
        "cheaper": _cheaper(run, best),
    }


def rows_beside(run: Run) -> list[Row]:
    """Return rows of the pick, the parent, trained baselines, the papers' models and n-grams, most expensive first.

    A model of the papers that this run trained or started from has only one row.
    """
    papers = {row.notation: row for row in rows_of(run)}
    compared = [member for member in run.members if member.role == "baseline" or member.notation in papers]
    rows = [Row("paper", name, *_priced(run, name), "", paper) for name, paper in papers.items()]
    rows += [_trained("trained", member, papers) for member in compared]
    if (parent := run.parent) is not None:
        priced, perplexity = _priced(run, parent.notation), f"{parent.perplexity:.2f}"
        rows.append(Row("parent", parent.notation, *priced, perplexity, papers.get(parent.notation)))
    rows += [_trained("pick", member, papers) for member in run.front[-1:]]
    shown = {row.name: row for row in rows}  # the last of a name
    known = {} if run.ngrams is None else run.ngrams.perplexities
    ngrams = [Row("n-gram", name, None, None, f"{known[name]:.2f}") for name in DRAWN_NGRAMS if known]
    return [*sorted(shown.values(), key=lambda row: -(row.latency_s or 0.0)), *ngrams]


def rows_of(run: Run) -> list[PublishedRow]:
    """Return the papers' own rows with the run's depth, width and prompt, including those that no fit used."""
    size = (run.base.num_layers, run.base.d_model, run.seq_len)
    rows = (*published_rows(), *held_out_rows())
    return [row for row in rows if (row.num_layers, row.d_model, row.seq_len) == size and row.own_method]


def marks_of(run: Run) -> list[str]:
    """List the caveats of each front member: worse than the trigram baseline, within noise, cost range over budget."""
    marks = []
    for member, noise in zip(run.front, noise_marks(run.front), strict=True):
        price = "its price range crosses the budget" if crosses(member, run.budget) else ""
        marks.append("; ".join(filter(None, (mark(member.mean_loss, run.ngrams), noise, price))))
    return marks


def _trained(kind: str, member: TrainedMember, papers: Mapping[str, PublishedRow]) -> Row:
    here, paper = perplexity_text(member).partition(" (")[0], papers.get(member.notation)
    return Row(kind, member.notation, member.latency_s, member.sent_bytes, here, paper)


def _priced(run: Run, notation: str) -> tuple[float, float]:
    architecture = parse(notation, run.base).architecture
    price = price_architecture(architecture, run.pricer, run.workload, run.config.cost_of).price
    return price.latency_s, price.sent_bytes


def _verdicts(run: Run, best: TrainedMember) -> list[str]:
    keys = [] if best.key_bytes is None else [f"{format_bytes(best.key_bytes)} of keys per token"]
    lines = [*keys, *also_texts(best)]
    if run.parent is not None:
        lines += [f"against its parent {against_parent(run.parent, best)}", agreement_text(best)]
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
    """Describe the knee if it is not the pick."""
    place = run.front.index(picked(run.front, "knee"))
    member = run.front[place]
    if member is best:
        return ""
    known = mark(member.mean_loss, run.ngrams)
    return (
        f"{member.notation} (no. {place + 1}): {format_seconds(member.latency_s)}, "
        f"perplexity {perplexity_text(member)}{known and f', {known}'}"
    )
