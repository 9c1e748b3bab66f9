"""Data of figures: perplexity against latency, latency by kind of op, and panels of lines or bars. Draws nothing."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple, TypeAlias

from costmodel.protocols import TRUST
from costmodel.protocols.published import PublishedRow
from costmodel.trust import caption
from nas.run.folder import ParentResult
from nas.run.members import TrainedMember
from nas.run.run import Run
from search_spaces.budget.feasible import format_budget
from search_spaces.deployed import deployed
from search_spaces.notation import parse

PRIOR_RANGE_SHARE = 0.005  # a latency range below this share of the latency is not drawn; the marker would hide it
LONGEST_NAME = 24  # characters
DRAWN_NGRAMS = ("trigram", "5-gram")  # always drawn; the next two only if they are in the range of what is drawn
DRAWN_IF_INSIDE = ("unigram", "bigram")


class Mark(NamedTuple):
    """A point of the Pareto plot: a member, with the perplexity of its mean loss over seeds, or a row of the papers.

    latency_min: minutes per token. range_min: latency range in minutes, None if not drawn. spread: perplexities two
        standard errors below and above the mean loss; None if no error is known.
    """

    name: str
    latency_min: float
    perplexity: float
    range_min: tuple[float, float] | None = None
    spread: tuple[float, float] | None = None


Group: TypeAlias = tuple[Mark, ...]  # marks in one style


class FrontFigure(NamedTuple):
    """Everything that the Pareto plot shows.

    budget_min: minutes per token. dominated: completed candidates that are not on the front, within the budget or not.
        Neither they nor `baselines` include members with a diverged seed. paused_min, diverged_min: minutes per token
        of trials without a final perplexity. published: rows of the papers. ngrams: perplexities of n-gram baselines by
        name; empty if not counted.
    """

    title: str
    budget_min: float
    budget: str
    front: Group
    dominated: Group
    baselines: Group
    paused_min: tuple[float, ...]
    diverged_min: tuple[float, ...]
    published: Group
    published_title: str
    ngrams: Mapping[str, float]
    ngrams_title: str
    parent: ParentResult | None


class Series(NamedTuple):
    """Points joined by a line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class LinePanel(NamedTuple):
    """Series on common axes. log_y: whether y is logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_y: bool = False


class BarPanel(NamedTuple):
    """Horizontal stacked bars. groups: names of the bars. series: name of each part, and its length in every bar."""

    title: str
    x_label: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float, ...]], ...]


class PanelFigure(NamedTuple):
    """Panels under one title, in rows of at most `columns`. row_height: inches."""

    title: str
    panels: tuple[LinePanel | BarPanel, ...]
    columns: int = 3
    row_height: float = 3.4


def front_figure(run: Run, rows: Sequence[PublishedRow]) -> FrontFigure:
    """Return the data of the Pareto plot of a run.

    rows: rows of the papers; those with a perplexity and the run's number of layers, prompt length and length of
    training sequences are shown. The unigram and bigram baselines are included if they lie between perplexities of
    members, trigram and 5-gram.
    """
    assert run.budget.latency_s is not None
    num_layers, seq_len = run.base.num_layers, run.seq_len
    on_front = {member.candidate_id for member in run.front}
    whole = [member for member in run.members if not member.num_diverged]
    behind = [member for member in whole if member.role == "candidate" and member.candidate_id not in on_front]
    ended = [record for record in run.finished if record.role != "baseline"]
    ngrams: dict[str, float] = {}
    if run.ngrams is not None:
        known = run.ngrams.perplexities
        drawn = [member.perplexity for member in whole] + [known[name] for name in DRAWN_NGRAMS]
        inside = [name for name in DRAWN_IF_INSIDE if min(drawn) <= known[name] <= max(drawn)]
        ngrams = {name: known[name] for name in (*inside, *DRAWN_NGRAMS)}
    return FrontFigure(
        title=_title(run.members),
        budget_min=run.budget.latency_s / 60,
        budget=f"budget {format_budget(run.budget)}",
        front=_group(run.front),
        dominated=_group(behind),
        baselines=_group([member for member in whole if member.role == "baseline"]),
        paused_min=tuple(record.latency_s / 60 for record in ended if record.status == "paused"),
        diverged_min=tuple(record.latency_s / 60 for record in ended if record.status == "diverged"),
        published=tuple(
            Mark(row.notation, row.latency_s / 60, row.perplexity)
            for row in rows
            if (row.num_layers, row.seq_len, row.seq_len) == (num_layers, seq_len, run.config.sequence_len)
            and row.perplexity is not None
        ),
        published_title=f"Papers' rows, L={num_layers}, T={seq_len}\n(full scale, other corpus and tokenizer)",
        ngrams=ngrams,
        ngrams_title="" if run.ngrams is None else f"n-gram models of {run.ngrams.tokens:,} tokens",
        parent=run.parent,
    )


def cost_figure(run: Run) -> PanelFigure:
    """Return stacked bars of predicted minutes per token by kind of op: for the front, the baselines and the parent."""
    named = {f"{number}  {label(member)}": member for number, member in enumerate(run.front, 1)}
    named |= {label(member): member for member in run.members if member.role == "baseline"}
    forms = {name: run.priced_form(member) for name, member in named.items()}
    if run.parent is not None:
        given = parse(run.parent.notation, run.base).architecture
        forms[f"parent {run.parent.notation}"] = deployed(given) if run.config.cost_of == "folded" else given
    price = cache(run.pricer.price)  # layers repeat their ops
    minutes: dict[str, list[float]] = {}  # a kind of op -> minutes of each form
    for place, form in enumerate(forms.values()):
        for node in chain.from_iterable(run.workload.graphs(form)):
            of_kind = minutes.setdefault(node.op.label or type(node.op).__name__, [0.0] * len(forms))
            of_kind[place] += price(node.op).latency_s / 60 / run.workload.new_tokens
    series = [(kind, tuple(values)) for kind, values in minutes.items() if any(values)]
    series.sort(key=lambda one: -sum(one[1]))
    panel = BarPanel("", "predicted latency per token (minutes)", tuple(forms), tuple(series))
    return PanelFigure("", (panel,), row_height=0.8 + 0.3 * len(forms))


def _title(trained: Sequence[TrainedMember]) -> str:
    """Return the scale and training tokens of the points, and the trust assumptions of their protocols."""
    done = [member.first for member in trained]
    scales = sorted({f"scale {trial.scale}, width {trial.width}, {trial.tokens:,} tokens" for trial in done})
    corpora = sorted({f"{trial.tokenizer}, {trial.split}" for trial in done})
    protocols = sorted({trial.protocol for trial in done})
    priced = [f"protocol {name}" + (f" ({caption(TRUST[name])})" if name in TRUST else "") for name in protocols]
    return "\n".join("; ".join(words) for words in (scales, corpora, priced))


def label(member: TrainedMember) -> str:
    """Return the notation, or the arch_id if the notation is too long for a label."""
    return member.notation if len(member.notation) <= LONGEST_NAME else member.arch_id


def _group(trained: Sequence[TrainedMember]) -> Group:
    marks = []
    for member in trained:
        range_min = None
        if member.latency_s_range is not None:
            low, high = member.latency_s_range
            range_min = (low / 60, high / 60) if high - low > PRIOR_RANGE_SHARE * member.latency_s else None
        marks.append(Mark(label(member), member.latency_s / 60, member.perplexity, range_min, member.perplexity_bounds))
    return tuple(marks)
