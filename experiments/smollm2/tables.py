"""Tables and the figure of `experiments run smollm2`."""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from experiments.figures import table
from nas.api import Run
from nas.report.front_figures import LinePanel, PanelFigure, Series
from nas.training.distillation.sub_layers import BlockScores
from search_spaces.notation import parse
from search_spaces.pricing import price_architecture


class Shown(NamedTuple):
    """A model in the table and the figure; `name` is `parent` or its arch_id, `placement` is the folded one."""

    name: str
    placement: str
    latency_s: float
    sent_bytes: float
    perplexity: float
    second_perplexity: float | None


def models(searched: Run) -> list[Shown]:
    """Return the folded parent, then the front, cheapest first."""
    parent, second = searched.parent, searched.meta.second
    assert parent is not None
    architecture = parse(parent.notation, searched.base).architecture
    whole = price_architecture(architecture, searched.pricer, searched.workload, "folded").price
    theirs = math.exp(second.parent_loss) if second and second.parent_loss is not None else None
    shown = [Shown("parent", parent.notation, whole.latency_s, whole.sent_bytes, parent.perplexity, theirs)]
    for member in searched.front:
        record = member.most_expensive
        runs_as = record.deployed or record.placement
        perplexities = member.perplexity, member.second_perplexity
        shown.append(Shown(member.arch_id, runs_as, record.latency_s, record.sent_bytes, *perplexities))
    return shown


def model_table(models: Sequence[Shown]) -> Table:
    """Tabulate the models with their cost and perplexity relative to the parent's, which comes first."""
    parent = models[0]

    def beside(value: float | None, parents: float | None) -> str:
        return "" if value is None or parents is None else f"{value:.2f} ({100 * (value / parents - 1):+.1f} %)"

    rows = [
        (
            model.name,
            f"{format_seconds(model.latency_s)} ({model.latency_s / parent.latency_s:.0%})",
            f"{format_bytes(model.sent_bytes)} ({model.sent_bytes / parent.sent_bytes:.0%})",
            beside(model.perplexity, parent.perplexity),
            beside(model.second_perplexity, parent.second_perplexity),
            model.placement,
        )
        for model in models
    ]
    columns = ("model", "seconds", "sent", "perplexity", "on the second corpus", "runs as")
    return table(columns, rows, title="a token, and what of the parent's it is")


def model_figure(models: Sequence[Shown]) -> PanelFigure:
    """Plot perplexity on both corpora against the cost of a token, as a share of the parent's, which comes first."""
    parent = models[0]
    by_axis = {
        f"bytes of all parties, % of the parent's {format_bytes(parent.sent_bytes)}": [m.sent_bytes for m in models],
        f"predicted seconds, % of the parent's {format_seconds(parent.latency_s)}": [m.latency_s for m in models],
    }
    second = [model.second_perplexity for model in models if model.second_perplexity is not None]
    by_corpus = {"": [model.perplexity for model in models]}
    if len(second) == len(models):
        by_corpus[", on the second corpus"] = second

    def series(values: Sequence[float]) -> Iterator[Series]:
        shares = tuple(100 * value / values[0] for value in values)
        for words, perplexities in by_corpus.items():
            yield Series(f"front{words}", shares[1:], tuple(perplexities[1:]))
            yield Series(f"parent{words}", shares[:1], tuple(perplexities[:1]))

    panels = (LinePanel("", axis, "perplexity", tuple(series(x))) for axis, x in by_axis.items())
    return PanelFigure("SmolLM2-135M: a token after a prompt of 128, private", tuple(panels))


def kind_table(scores: BlockScores) -> Table:
    """Tabulate median block scores by what is replaced, for the first layer and each third of the depth."""
    num_layers = 1 + max(sub_layer.depth for sub_layer in scores.divergences)
    thirds = [range(place * num_layers // 3, (place + 1) * num_layers // 3) for place in range(3)]
    by_kind: dict[tuple[str, str, str], dict[int, float]] = {}
    for (depth, *kind), value in scores.divergences.items():
        by_kind.setdefault((kind[0], kind[1], kind[2]), {})[depth] = value
    rows = [
        (" ".join(kind), *(f"{median(values[depth] for depth in part):.4f}" for part in (range(1), *thirds)))
        for kind, values in sorted(by_kind.items())
        if any(values.values())
    ]
    columns = ("block scores, medians in nats", "first layer", "first third", "second", "last")
    return table(columns, rows)
