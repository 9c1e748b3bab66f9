"""Compares every printed count, FLOP, byte and minute with ours under protocol `published`, and locates the FLOPs.

Costs are those of the unfolded row, as in the papers.
"""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from costmodel import ops
from costmodel.calibration.validate_published import PRINTED, paper_flops, row_costs
from costmodel.estimate import estimate
from costmodel.protocols import published
from costmodel.protocols.published_rows import PublishedRow
from experiments.papers.paper_table import Cell, Column, PaperTable
from experiments.papers.results import Experiment, rank_notes
from experiments.papers.settings import Settings
from nas.report.panels import BarPanel, LinePanel, PanelFigure, Series
from search_spaces.lower import lower

FLOPS, COSTS = ("FFN GFLOP", "attention GFLOP"), ("communication GB", "latency min")  # columns of PRINTED
NET = Column("net")
SHARES = ("FFN", "linears of attention", "products of attention")


class RowCosts(NamedTuple):
    """A row by our formulas, and as a paper prints it, if one does.

    `counts` are the nonlinear operations of all blocks as in the papers (a softmax per head, a norm or activation per
    layer), `ours` the values of PRINTED, `extrapolated` the parts that no printed row has.
    """

    counts: dict[str, int]
    ours: dict[str, float]
    extrapolated: tuple[str, ...]
    row: PublishedRow | None

    def printed(self, what: str) -> float | None:
        """Return the printed value of a column of PRINTED."""
        return None if self.row is None else float(getattr(self.row, PRINTED[what]))

    def error_percent(self, what: str) -> float | None:
        """Return our value relative to the printed one, minus 1, in percent."""
        printed = self.printed(what)
        return None if printed is None else 100 * (self.ours[what] / printed - 1)


def costs_of(settings: Settings) -> dict[str, RowCosts]:
    """Return the costs of every row."""
    pricer, costs = published.load(), dict[str, RowCosts]()
    for row in settings.rows:
        graph = lower(settings.member(row).architecture, settings.seq_len)
        estimated = estimate(graph, pricer)
        # the papers do not count the final norm, which is in no block
        kinds = Counter(type(node.op) for node in graph if isinstance(node.layer, int))
        counts = {
            "softmax": sum(node.op.heads for node in graph if isinstance(node.op, ops.Softmax)),
            "LayerNorm": kinds[ops.LayerNorm],
            "GELU": kinds[ops.Gelu],
            "ReLU": kinds[ops.Relu] + kinds[ops.LeakyRelu],
        }
        ours = row_costs(graph, estimated.total)
        costs[row] = RowCosts(counts, ours, estimated.extrapolated, settings.printed.get(row))
    return costs


def operation_table(experiment: Experiment) -> PaperTable:
    """Tabulate nonlinear operations of the blocks, and FLOPs."""
    costs = costs_of(experiment.settings)
    flops = [Column(f"{what}, {whose}", ".1f") for what in FLOPS for whose in ("printed", "ours")]
    rows = tuple(
        (name, *row.counts.values(), *(cell for what in FLOPS for cell in (row.printed(what), row.ours[what])))
        for name, row in costs.items()
    )
    columns = (NET, *map(Column, next(iter(costs.values())).counts), *flops)
    notes = ("as in the papers the final norm is not counted, and FLOPs are of blocks alone (FLOP = 2 MAC)",)
    return PaperTable("operations", f"{experiment.settings.title}: operations", columns, rows, notes)


def cost_table(experiment: Experiment) -> PaperTable:
    """Tabulate printed and predicted communication and latency, and perplexities that were printed or trained."""
    settings, costs = experiment.settings, costs_of(experiment.settings)
    printed, trained = settings.printed_perplexities, experiment.perplexities
    columns = [NET]
    for what in COSTS:
        columns += [Column(f"{what}, printed", ".2f"), Column(f"{what}, ours", ".2f")]
        columns.append(Column(f"{what.split()[0]}, error %", "+.2f"))
    columns.append(Column("perplexity, printed", ".4g"))
    columns += [Column(f"perplexity, at scale {settings.scale}", ".4g")] if trained else []
    rows = []
    for name, row in costs.items():
        cells = [cell for what in COSTS for cell in (row.printed(what), row.ours[what], row.error_percent(what))]
        rows.append((name, *cells, printed.get(name), *([trained[name]] if trained else [])))
    notes = (*_cost_notes(settings, costs), *rank_notes(experiment))
    return PaperTable("costs", f"{settings.title}: costs", tuple(columns), tuple(rows), notes)


def savings_table(experiment: Experiment) -> PaperTable:
    """Tabulate how many times cheaper each row is than the first."""
    costs = costs_of(experiment.settings)
    reference = next(iter(costs))
    columns = [Column(f"{what.split()[0]}, {whose}", ".2f") for what in COSTS for whose in ("printed", "ours")]
    rows = tuple((name, *(saving for what in COSTS for saving in _savings(costs, name, what))) for name in costs)
    title = f"{experiment.settings.title}: times less than {reference}"
    return PaperTable("savings", title, (NET, *columns), rows, (_cost_notes(experiment.settings, costs)[0],))


def _savings(costs: dict[str, RowCosts], name: str, what: str) -> tuple[float | None, float]:
    """Return the first row's cost divided by another's: printed, None if not known, and ours."""
    first, row = next(iter(costs.values())), costs[name]
    above, below = first.printed(what), row.printed(what)
    return above / below if above and below else None, first.ours[what] / row.ours[what]


def _cost_notes(settings: Settings, costs: dict[str, RowCosts]) -> list[str]:
    notes = [f"ours: protocol published, nets as written, one token from a prompt of {settings.seq_len}"]
    if printed := [costed.row for costed in costs.values() if costed.row]:
        sources = "; ".join(dict.fromkeys(row.source for row in printed))
        fitted = "never fitted" if any(row.held_out for row in printed) else "our formulas are fitted on them"
        notes.append(f"printed: {sources}; {len(printed)} of {len(costs)} rows have printed costs, {fitted}")
        notes.append(f"largest error: {', '.join(f'{what.split()[0]} {_worst(costs, what)}' for what in COSTS)}")
    else:
        notes.append("no paper prints costs of these rows")
    if outside := dict.fromkeys(text for row in costs.values() for text in row.extrapolated):
        notes.append(f"extrapolated: {'; '.join(outside)}")
    return notes


def _worst(costs: dict[str, RowCosts], what: str) -> str:
    errors = {name: error for name, row in costs.items() if (error := row.error_percent(what)) is not None}
    name = max(errors, key=lambda name: abs(errors[name]))
    return f"{errors[name]:+.2f} % ({name})"


def savings_figure(experiment: Experiment) -> PanelFigure:
    """Plot the printed and predicted savings of the printed rows as bars."""
    costs = costs_of(experiment.settings)
    names = tuple(name for name, row in costs.items() if row.row)
    panels = []
    for what in COSTS:
        pairs = [_savings(costs, name, what) for name in names]
        printed = tuple(saving for saving, _ in pairs if saving is not None)
        series = (("printed", printed), ("ours", tuple(saving for _, saving in pairs)))
        panels.append(BarPanel(what.split()[0], f"times less than {next(iter(costs))}", names, series))
    return PanelFigure(f"{experiment.settings.title}: savings", tuple(panels), columns=2)


def front_figure(experiment: Experiment) -> PanelFigure:
    """Plot printed perplexity against printed and predicted latency, for the papers' rows and He and Hofmann's."""
    costs = costs_of(experiment.settings)
    panels = []
    for title, is_ours in (("printed latency", False), ("our latency", True)):
        series = []
        for whose, is_own in (("the papers' method", True), ("He and Hofmann's block", False)):
            points = [
                (name, costed.ours["latency min"] if is_ours else float(row.latency_min), row.perplexity)
                for name, costed in costs.items()
                if (row := costed.row) and row.perplexity is not None and row.own_method == is_own
            ]
            if points:
                names, minutes, perplexities = zip(*points, strict=True)
                series.append(Series(whose, minutes, perplexities, names, joined=False))
        panels.append(LinePanel(title, "minutes per token", "printed perplexity", tuple(series)))
    return PanelFigure(experiment.settings.title, tuple(panels), columns=2)


def flops_table(experiment: Experiment) -> PaperTable:
    """Tabulate the FLOPs of each row by kind and prompt length, in the papers' convention."""
    rows: list[tuple[Cell, ...]] = []
    for name in experiment.settings.rows:
        rows += [(name, context, *cells) for context, cells in _flops_by_context(experiment.settings, name)]
    columns = (NET, Column("T"), *(Column(name, ".1f") for name in (*FLOPS, *(f"{name} %" for name in SHARES))))
    notes = ("papers' convention: FLOP = 2 MAC, blocks alone, 3 T^2 d for the two products of attention",)
    return PaperTable("flops", experiment.settings.title, columns, tuple(rows), notes)


def _flops_by_context(settings: Settings, name: str) -> list[tuple[int, tuple[float, ...]]]:
    by_context = []
    for context in settings.contexts:
        # learned positions, which have no FLOPs, end at the context
        flops = paper_flops(lower(replace(settings.member(name).architecture, context=context), context))
        whole = (flops.ffn + flops.attention) / 100
        by_context.append((context, (flops.ffn / 1e9, flops.attention / 1e9, *(part / whole for part in flops))))
    return by_context


def flops_figure(experiment: Experiment) -> PanelFigure:
    """Plot shares against prompt length, one panel per row."""
    panels = []
    for name in experiment.settings.rows:
        contexts, cells = zip(*_flops_by_context(experiment.settings, name), strict=True)
        shares = zip(SHARES, list(zip(*cells, strict=True))[len(FLOPS) :], strict=True)
        series = tuple(Series(what, tuple(map(float, contexts)), share) for what, share in shares)
        panels.append(LinePanel(name, "tokens of the prompt", "% of FLOPs", series, log_x=2))
    return PanelFigure(experiment.settings.title, tuple(panels))
