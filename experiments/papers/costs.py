"""Every printed count, FLOP, byte and minute beside ours, under protocol `published`; and where the FLOPs of a net are.

Prices are of a row as it is written, which is what the papers priced, not of what it would deploy to.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel import ops
from costmodel.calibration.validate_published import PaperFlops, paper_flops
from costmodel.estimate import estimate
from costmodel.protocols import published
from costmodel.protocols.published_rows import PublishedRow
from experiments.papers.paper_table import Cell, Column, PaperTable
from experiments.papers.results import Experiment, rank_notes
from experiments.papers.settings import Settings
from nas.report.panels import BarPanel, LinePanel, PanelFigure, Series
from search_spaces.lower import lower

GFLOP, GB, MINUTE = 1e9, 1e9, 60.0
COSTS = ("communication", "latency")  # as `RowCosts` has them
NET = Column("net")
SHARES = ("FFN", "linears of attention", "products of attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowCosts:
    """A row by our formulas, and as printed where it is.

    num_*: nonlinear operations of all blocks as the papers count them: a softmax a head, a norm or activation a layer.
    extrapolated: what of it no printed row has.
    """

    num_softmax: int
    num_layernorm: int
    num_gelu: int
    num_relu: int
    flops: PaperFlops
    sent_bytes: float
    latency_s: float
    extrapolated: tuple[str, ...]
    printed: PublishedRow | None

    @property
    def costs(self) -> tuple[float, float]:
        """GB and minutes, by our formulas."""
        return self.sent_bytes / GB, self.latency_s / MINUTE

    @property
    def printed_costs(self) -> tuple[float, float] | tuple[None, None]:
        """GB and minutes, where a paper has them."""
        if self.printed is None:
            return None, None
        return float(self.printed.sent_gigabytes), float(self.printed.latency_min)


def costs_of(settings: Settings) -> dict[str, RowCosts]:
    """Every row, priced."""
    pricer = published.load()
    return {row: _row_costs(settings, row, pricer) for row in settings.rows}


def _row_costs(settings: Settings, row: str, pricer: published.Published) -> RowCosts:
    graph = lower(settings.member(row).architecture, settings.seq_len)
    estimated = estimate(graph, pricer)
    # the final norm is in no block, and not in the papers' counts
    counts = Counter(type(node.op) for node in graph if isinstance(node.layer, int))
    return RowCosts(
        num_softmax=sum(node.op.heads for node in graph if isinstance(node.op, ops.Softmax)),
        num_layernorm=counts[ops.LayerNorm],
        num_gelu=counts[ops.Gelu],
        num_relu=counts[ops.Relu] + counts[ops.LeakyRelu],
        flops=_flops(settings, row, settings.seq_len),
        sent_bytes=estimated.total.sent_bytes,
        latency_s=estimated.total.latency_s,
        extrapolated=estimated.extrapolated,
        printed=settings.printed.get(row),
    )


def _flops(settings: Settings, row: str, seq_len: int) -> PaperFlops:
    architecture = settings.member(row).architecture
    ffns, is_shaped = [layer.ffn for layer in architecture.layers], architecture.block_facts.is_shaped
    return paper_flops(ffns, d_model=architecture.d_model, seq_len=seq_len, simplified=is_shaped)


def saving(reference: RowCosts, costs: RowCosts, which: int, *, printed: bool) -> float | None:
    """The reference's cost over a row's. which: of `COSTS`. printed: of both, None where the papers do not print it."""
    above, below = ((row.printed_costs if printed else row.costs)[which] for row in (reference, costs))
    return None if above is None or below is None else above / below


def error_percent(printed: float, ours: float) -> float:
    """Ours over printed, minus 1."""
    return 100 * (ours / printed - 1)


def operation_table(experiment: Experiment) -> PaperTable:
    """Nonlinear operations of the blocks, and FLOPs."""
    flops = [f"{what} GFLOP, {whose}" for what in ("FFN", "attention") for whose in ("printed", "ours")]
    columns = [NET, *map(Column, ("softmax", "LayerNorm", "GELU", "ReLU")), *(Column(name, ".1f") for name in flops)]
    rows = [
        (
            *(row, priced.num_softmax, priced.num_layernorm, priced.num_gelu, priced.num_relu),
            *(float(priced.printed.ffn_gflop) if priced.printed else None, priced.flops.ffn / GFLOP),
            *(float(priced.printed.attention_gflop) if priced.printed else None, priced.flops.attention / GFLOP),
        )
        for row, priced in costs_of(experiment.settings).items()
    ]
    notes = ("as in the papers the final norm is not counted, and FLOPs are of blocks alone (FLOP = 2 MAC)",)
    title = f"{experiment.settings.title}: operations"
    return PaperTable("operations", title, tuple(columns), tuple(rows), notes)


def cost_table(experiment: Experiment) -> PaperTable:
    """Communication and latency beside the printed ones; perplexities as far as they are printed and trained."""
    settings, costs = experiment.settings, costs_of(experiment.settings)
    printed, trained = settings.printed_perplexities, experiment.perplexities
    columns = [NET]
    for what in ("communication GB", "latency min"):
        columns += [Column(f"{what}, printed", ".2f"), Column(f"{what}, ours", ".2f")]
        columns.append(Column(f"{what.split()[0]}, error %", "+.2f"))
    columns.append(Column("perplexity, printed", ".4g"))
    columns += [Column(f"perplexity, at scale {settings.scale}", ".4g")] if trained else []
    rows = []
    for row, priced in costs.items():
        cells: list[Cell] = [row]
        for paper, ours in zip(priced.printed_costs, priced.costs, strict=True):
            cells += [paper, ours, None if paper is None else error_percent(paper, ours)]
        rows.append((*cells, printed.get(row), *([trained[row]] if trained else [])))
    notes = (*_cost_notes(settings, costs), *rank_notes(experiment))
    return PaperTable("costs", f"{settings.title}: costs", tuple(columns), tuple(rows), notes)


def savings_table(experiment: Experiment) -> PaperTable:
    """How many times less each row costs than the first."""
    costs = costs_of(experiment.settings)
    reference, first = next(iter(costs.items()))
    columns = [NET]
    columns += [Column(f"{what}, {whose}", ".2f") for what in COSTS for whose in ("printed", "ours")]
    rows = []
    for row, priced in costs.items():
        both = [
            saving(first, priced, which, printed=printed) for which in range(len(COSTS)) for printed in (True, False)
        ]
        rows.append((row, *both))
    title = f"{experiment.settings.title}: times less than {reference}"
    return PaperTable("savings", title, tuple(columns), tuple(rows), (_cost_notes(experiment.settings, costs)[0],))


def _cost_notes(settings: Settings, costs: dict[str, RowCosts]) -> list[str]:
    printed = [(row, priced) for row, priced in costs.items() if priced.printed]
    notes = [f"ours: protocol published, nets as written, one token from a prompt of {settings.seq_len}"]
    if printed:
        sources = dict.fromkeys(priced.printed.source for _, priced in printed if priced.printed)
        held_out = any(priced.printed and priced.printed.held_out for _, priced in printed)
        fitted = "never fitted" if held_out else "our formulas are fitted on them"
        notes.append(f"printed: {'; '.join(sources)}; {len(printed)} of {len(costs)} rows have printed costs, {fitted}")
        notes.append(f"largest error: communication {_worst(printed, 0)}, latency {_worst(printed, 1)}")
    else:
        notes.append("no paper prints costs of these rows")
    if outside := dict.fromkeys(text for priced in costs.values() for text in priced.extrapolated):
        notes.append(f"extrapolated: {'; '.join(outside)}")
    return notes


def _worst(printed: Sequence[tuple[str, RowCosts]], which: int) -> str:
    pairs = {row: (priced.printed_costs[which], priced.costs[which]) for row, priced in printed}
    errors = {row: error_percent(paper, ours) for row, (paper, ours) in pairs.items() if paper is not None}
    row = max(errors, key=lambda name: abs(errors[name]))
    return f"{errors[row]:+.2f} % ({row})"


def savings_figure(experiment: Experiment) -> PanelFigure:
    """Bars of the rows that are printed, printed and ours."""
    costs = costs_of(experiment.settings)
    reference, first = next(iter(costs.items()))
    both = {row: priced for row, priced in costs.items() if priced.printed}
    panels = []
    for which, title in enumerate(COSTS):
        series = []
        for name in ("printed", "ours"):
            savings = [saving(first, priced, which, printed=name == "printed") for priced in both.values()]
            series.append((name, tuple(value for value in savings if value is not None)))
        panels.append(BarPanel(title, f"times less than {reference}", tuple(both), tuple(series)))
    return PanelFigure(f"{experiment.settings.title}: savings", tuple(panels), columns=2)


def front_figure(experiment: Experiment) -> PanelFigure:
    """Printed perplexity against latency: the papers' own rows and He and Hofmann's, at printed and at our minutes."""
    costs = costs_of(experiment.settings)
    panels = []
    for title, ours in (("printed latency", False), ("our latency", True)):
        series = []
        for name, is_own in (("the papers' method", True), ("He and Hofmann's block", False)):
            points = [
                (row, (priced.latency_s if ours else priced.printed.latency_s) / MINUTE, priced.printed.perplexity)
                for row, priced in costs.items()
                if priced.printed and priced.printed.perplexity is not None and priced.printed.own_method == is_own
            ]
            if points:
                names, minutes, perplexities = zip(*points, strict=True)
                series.append(Series(name, minutes, perplexities, names, joined=False))
        panels.append(LinePanel(title, "minutes per token", "printed perplexity", tuple(series)))
    return PanelFigure(experiment.settings.title, tuple(panels), columns=2)


def flops_table(experiment: Experiment) -> PaperTable:
    """Where the FLOPs of each row are, by prompt length, in the papers' convention."""
    rows = [
        (row, context, flops.ffn / GFLOP, flops.attention / GFLOP, *shares)
        for row in experiment.settings.rows
        for context, flops, shares in _flops_by_context(experiment.settings, row)
    ]
    names = ("FFN GFLOP", "attention GFLOP", *(f"{name} %" for name in SHARES))
    columns = (NET, Column("T"), *(Column(name, ".1f") for name in names))
    notes = ("papers' convention: FLOP = 2 MAC, blocks alone, 3 T^2 d for the two products of attention",)
    return PaperTable("flops", experiment.settings.title, columns, tuple(rows), notes)


def _flops_by_context(settings: Settings, row: str) -> list[tuple[int, PaperFlops, tuple[float, float, float]]]:
    by_context = []
    for context in settings.contexts:
        flops = _flops(settings, row, context)
        whole = (flops.ffn + flops.attention) / 100
        by_context.append((context, flops, (flops.ffn / whole, flops.linears / whole, flops.products / whole)))
    return by_context


def flops_figure(experiment: Experiment) -> PanelFigure:
    """Shares against prompt length, a panel a row."""
    panels = []
    for row in experiment.settings.rows:
        by_context = _flops_by_context(experiment.settings, row)
        contexts = tuple(float(context) for context, _, _ in by_context)
        series = tuple(
            Series(name, contexts, tuple(shares[place] for _, _, shares in by_context))
            for place, name in enumerate(SHARES)
        )
        panels.append(LinePanel(row, "tokens of the prompt", "% of FLOPs", series, log_x=2))
    return PanelFigure(experiment.settings.title, tuple(panels))
