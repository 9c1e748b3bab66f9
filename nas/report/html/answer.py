"""The answer of a report: the best model for the budget, models to compare it with, and everything that limits it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from costmodel.config.units import format_bytes, format_count, format_seconds
from costmodel.estimate import outside_data
from costmodel.protocols.published import PublishedRow, held_out_rows, published_rows
from costmodel.report.savings import savings_line
from costmodel.trust import described, shown
from nas.report import summary
from nas.report.html.placements import kept_words
from nas.report.summary import IN_NOISE, against_parent, agreement_text, also_texts, mark, perplexity_text
from nas.run.ledger import architecture_of
from nas.run.members import TrainedMember, crosses, in_noise, picked, verdict
from nas.run.run import Run
from search_spaces.bases import base_architecture
from search_spaces.budget.priced_space import cheaper, price_architecture
from search_spaces.notation import parse

DRAWN_NGRAMS = ("5-gram", "trigram")  # n-gram baselines that have a row

# kind of a row -> note beside its name; of rows with the same name, the first kind in this order is shown
NOTES = {"pick": "the pick", "parent": "the parent", "trained": "trained here", "paper": "", "n-gram": "n-gram"}


class Row(NamedTuple):
    """One model in the comparison.

    kind: a key of NOTES. name: notation, or name of an n-gram model. latency_s, sent_bytes: per token; None for n-gram
        models. here: perplexity in this run, as text; empty without one. paper: row in the papers, or None.
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
    """Return texts on the pick: the member of the front, which is not empty, with the lowest perplexity.

    Key `keeps`: the parts of the pick that do not fold away. `verdicts`: list of statements about the pick. `cheaper`:
    description of the knee of the front; empty if the knee is the pick.
    """
    *_, best = run.front
    verdicts = [] if best.key_bytes is None else [f"{format_bytes(best.key_bytes)} of keys per token"]
    verdicts += also_texts(best)
    if run.parent is not None:
        verdicts += [f"against its parent {against_parent(run.parent, best)}", agreement_text(best)]
    if run.ngrams is not None:
        floor = run.ngrams.perplexities[DRAWN_NGRAMS[0]]
        word = "better" if best.perplexity < floor else "worse"
        verdicts.append(f"{word} than the {DRAWN_NGRAMS[0]} ({floor:.1f})")
    if len(run.front) > 1:
        tested = verdict(best, run.front[-2])
        beyond = "better than its cheaper neighbour beyond noise" if tested == "better" else IN_NOISE
        untested = "one seed, so no difference to other members is shown"
        verdicts.append(untested if tested == "not tested" else beyond)
    if crosses(best, run.budget) and best.latency_s_range is not None:
        low, high = map(format_seconds, best.latency_s_range)
        verdicts.append(f"price range {low} to {high} crosses the budget")
    place, knee = run.front.index(picked(run.front, "knee")), ""
    if (member := run.front[place]) is not best:
        known = mark(member.val_loss, run.ngrams)
        knee = (
            f"{member.notation} (no. {place + 1}): {format_seconds(member.latency_s)}, "
            f"perplexity {perplexity_text(member)}{known and f', {known}'}"
        )
    return {
        "keeps": kept_words(architecture_of(best.first, run.base), run.config.cost_of),
        "verdicts": [line for line in verdicts if line],
        "cheaper": knee,
    }


def rows_beside(run: Run) -> list[Row]:
    """Return rows of the pick, the parent, baselines and the papers' models, most expensive first, and then of n-grams.

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
    """Return the printed costs of the papers' own architectures at the run's depth, width and prompt length."""
    size = (run.base.num_layers, run.base.d_model, run.seq_len)
    rows = (*published_rows(), *held_out_rows())
    return [row for row in rows if (row.num_layers, row.d_model, row.seq_len) == size and row.own_method]


def marks_of(run: Run) -> list[str]:
    """Return the caveats of each front member as text: worse than the trigram, within noise, or perhaps over budget."""
    marks = []
    for member, inside in zip(run.front, in_noise(run.front), strict=True):
        noise = IN_NOISE if inside else ""
        price = "its price range crosses the budget" if crosses(member, run.budget) else ""
        marks.append("; ".join(filter(None, (mark(member.val_loss, run.ngrams), noise, price))))
    return marks


def _trained(kind: str, member: TrainedMember, papers: Mapping[str, PublishedRow]) -> Row:
    here, paper = perplexity_text(member).partition(" (")[0], papers.get(member.notation)
    return Row(kind, member.notation, member.latency_s, member.sent_bytes, here, paper)


def _priced(run: Run, notation: str) -> tuple[float, float]:
    architecture = parse(notation, run.base).architecture
    price = price_architecture(architecture, run.pricer, run.workload, run.config.cost_of).price
    return price.latency_s, price.sent_bytes


def caveats(run: Run) -> dict[str, list[str]]:
    """Return the limits of the answer by subject, most important first, without empty subjects."""
    whose = shown(run.config.public_layers, run.config.client_layers)
    known = {
        "Scale": _scale(run),
        "Order": summary.order_lines(run),
        "Seeds": _seeds(run),
        "Second corpus": summary.second_lines(run),
        "Search": _search(run),
        "Costs": list(_prices(run)),
        "Trust": [f"{pricer.protocol}: {described(pricer.trust)}{whose}" for pricer in run.pricers],
        "Folding": [*summary.infeasible_lines(run), *summary.unstable_lines(run)],
    }
    return {subject: lines for subject, lines in known.items() if lines}


def _scale(run: Run) -> list[str]:
    completed = run.completed
    if not completed:
        return []
    trial = completed[0]
    trained = f"{trial.tokens:,} tokens per candidate{summary.in_sequences(run)}, {trial.tokenizer}, {trial.split}"
    if run.meta.planned_tokens is not None:
        trained += f" (of {run.meta.planned_tokens:,}, because of the time budget, which costs accuracy)"
    lines = [f"Perplexities are of the model's own width, {trial.width}: {trained}."]
    if run.is_proxy:
        lines = [
            f"Perplexities are of scale {trial.scale}: width {trial.width} instead of {run.base.d_model}, {trained}. "
            "They rank candidates at this scale and are not those that the full model would reach. Costs are those "
            "of the full size."
        ]
        if run.base == base_architecture("gpt2-small"):
            lines.append(
                "Of 24 placements trained at widths 48, 96 and 192 the order held (rank correlation 0.97 and 0.98 a "
                "doubling), but layers in a row without attention came to cost more, and nothing else did: of members "
                "that are close here, the one with no long stretch without attention is the likelier one at full width "
                "(docs/proxies.md)."
            )
    if any(row.perplexity is not None for row in rows_of(run)):
        lines.append(
            "The papers' perplexities are of full-scale models, another corpus and another tokenizer: only their order "
            "can be compared."
        )
    return lines


def _seeds(run: Run) -> list[str]:
    lines = []
    seeds = sorted({member.num_seeds for member in run.front})
    if seeds:
        words = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        spread = summary.spread_words(run.front) or "which shows no difference"
        lines.append(f"Members of the front have {words} seed{'' if seeds[-1] == 1 else 's'}; {spread}.")
    inside = [number for number, noise in enumerate(in_noise(run.front), 1) if noise]
    if inside:
        lines.append(f"Within noise of their cheaper neighbour: no. {', '.join(map(str, inside))}.")
    single = [member for member in run.members if member.num_seeds == 1 and member not in run.front]
    if single:
        lines.append(f"{len(single)} more trained with one seed each: a lucky one may have been passed over.")
    return lines


def _search(run: Run) -> list[str]:
    ended = [record for record in run.finished if record.role == "candidate"]
    early = {status: sum(record.status == status for record in ended) for status in ("paused", "diverged", "failed")}
    counts = ", ".join(f"{count} {status}" for status, count in early.items() if count)
    lines = [
        f"{len(ended)} of {format_count(run.meta.num_feasible)} members within the budget were tried "
        f"({format_count(run.meta.num_members)} in the space)"
        f"{f'; {counts}' if counts else ''}. The best of the space is likely to be another."
    ]
    tried = sum(record.generation >= 0 for record in ended)
    if tried < len(ended):
        lines.append(f"{len(ended) - tried} of them were trained by another run, with which this one began.")
    if tried < run.config.num_trials:
        lines.append(f"The search ended after {tried} of {run.config.num_trials} candidates.")
    return lines


def _prices(run: Run) -> Iterator[str]:
    present = ", ".join(pricer.cost_model_id for pricer in run.pricers)
    if run.meta.cost_model_id != present:
        yield (
            f"The ledger was priced by cost model {run.meta.cost_model_id}; what this page prices itself is of "
            f"{present}, which may price alike or not."
        )
    ranges = [(member.latency_s, member.latency_s_range) for member in run.front]
    widths = [max(high - price, price - low) / price for price, span in ranges if span for low, high in [span]]
    if widths:
        low, high = min(span[0] for _, span in ranges if span), max(span[1] for _, span in ranges if span)
        yield (
            f"Seconds are predicted: over {run.pricer.range_over} they move by up to {max(widths):.1%} "
            f"(the front from {format_seconds(low)} to {format_seconds(high)})."
        )
    forms = [run.priced_form(member) for member in run.front]
    graphs = [graph for form in forms for graph in run.workload.graphs(form)]
    if words := outside_data(run.pricer, graphs):
        yield f"The front's prices are {words}."
    if forms and (found := cheaper(forms[-1], run.pricer, run.workload, run.config.cost_of)):
        how = "flags of `costmodel estimate`, and nas.private computes only the last row by itself"
        yield f"{savings_line(found, 'The pick, ')}; {how}."
