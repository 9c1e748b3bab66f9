"""The answer of a report: the best model for the budget, and models to compare it with."""

from typing import Any, NamedTuple

from costmodel.config.units import format_bytes, format_seconds
from costmodel.protocols.published_rows import PublishedRow, held_out_rows, published_rows
from nas.report.html.placements import kept_words
from nas.report.summary import IN_NOISE, against_parent, agreement_text, also_texts, mark, noise_marks, perplexity_text
from nas.run.front import crosses, picked
from nas.run.ledger import architecture_of
from nas.run.members import TrainedMember, verdict
from nas.run.run import Run
from search_spaces.notation import parse
from search_spaces.pricing import price_architecture

DRAWN_NGRAMS = ("5-gram", "trigram")  # orders with a row of their own

# kind of a row -> note beside its name; of rows with the same name, the first kind in this order is shown
NOTES = {"pick": "the pick", "parent": "the parent", "trained": "trained here", "paper": "", "n-gram": "n-gram"}


class Row(NamedTuple):
    """One model in the comparison. kind: a key of NOTES. Columns without a value are empty."""

    kind: str
    name: str
    note: str
    price: str
    sent: str
    printed_price: str
    here: str
    printed: str


def answer_of(run: Run) -> dict[str, Any] | None:
    """Describe the pick, the member of the front with the lowest perplexity; None if the front is empty.

    verdicts: results about it, most important first.
    """
    if not run.front:
        return None
    best = run.front[-1]
    perplexity, _, seeds = perplexity_text(best).partition(" (")
    return {
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


def rows_beside(run: Run) -> list[Row]:
    """Return rows of the pick, the parent, trained baselines, the papers' models and n-grams, most expensive first.

    A model of the papers that this run has trained, or started from, has one row.
    """
    papers = {row.notation: row for row in rows_of(run)}
    models = [("pick", member.notation, *_known(member)) for member in run.front[-1:]]
    compared = [member for member in run.members if member.role == "baseline" or member.notation in papers]
    models += [("trained", member.notation, *_known(member)) for member in compared]
    if run.parent is not None:
        models.append(
            ("parent", run.parent.notation, *_priced(run, run.parent.notation), f"{run.parent.perplexity:.2f}")
        )
    models += [("paper", name, *_priced(run, name), "") for name in papers]
    models.sort(key=lambda model: list(NOTES).index(model[0]), reverse=True)
    shown = {model[1]: model for model in models}
    rows = []
    for kind, name, latency_s, sent_bytes, here in sorted(shown.values(), key=lambda model: -model[2]):
        row, price, sent = papers.get(name), format_seconds(latency_s), format_bytes(sent_bytes)
        printed_price = "" if row is None else format_seconds(row.latency_s)
        printed = "" if row is None else "diverged" if row.perplexity is None else f"{row.perplexity:.2f}"
        rows.append(Row(kind, name, NOTES[kind], price, sent, printed_price, here, printed))
    known = {} if run.ngrams is None else run.ngrams.perplexities
    return rows + [
        Row("n-gram", name, NOTES["n-gram"], "", "", "", f"{known[name]:.2f}", "") for name in DRAWN_NGRAMS if known
    ]


def rows_of(run: Run) -> list[PublishedRow]:
    """Return the papers' own rows with the run's depth, width and prompt, including those that no fit used."""
    size = (run.base.num_layers, run.base.d_model, run.seq_len)
    rows = (*published_rows(), *held_out_rows())
    return [row for row in rows if (row.num_layers, row.d_model, row.seq_len) == size and row.own_method]


def marks_of(run: Run) -> list[str]:
    """List the objections to each member of the front."""
    marks = []
    for member, noise in zip(run.front, noise_marks(run.front), strict=True):
        price = "its price range crosses the budget" if crosses(member, run.budget) else ""
        marks.append("; ".join(filter(None, (mark(member.mean_loss, run.ngrams), noise, price))))
    return marks


def _known(member: TrainedMember) -> tuple[float, float, str]:
    """Seconds and bytes per token of a trained member, and its perplexity."""
    return member.latency_s, member.sent_bytes, perplexity_text(member).partition(" (")[0]


def _priced(run: Run, notation: str) -> tuple[float, float]:
    """Seconds and bytes per token of an architecture at the run's costs."""
    architecture = parse(notation, run.base).architecture
    price = price_architecture(architecture, run.pricer, run.workload, run.config.accounting).price
    return price.latency_s, price.sent_bytes


def _verdicts(run: Run, best: TrainedMember) -> list[str]:
    keys = [] if best.key_bytes is None else [f"{format_bytes(best.key_bytes)} of keys a token"]
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
