"""Where the FLOPs of a net are, by prompt length, in the papers' convention."""

from costmodel.calibration.validate_published import PaperFlops, paper_flops
from experiments.papers.paper_table import Column, PaperTable
from experiments.papers.results import Experiment
from experiments.papers.settings import Settings
from nas.report.panels import LinePanel, PanelFigure, Series

GFLOP = 1e9
SHARES = ("FFN", "linears of attention", "products of attention")


def flops_table(experiment: Experiment) -> PaperTable:
    """Where the FLOPs of each row are, by prompt length, in the papers' convention."""
    rows = [
        (row, context, flops.ffn / GFLOP, flops.attention / GFLOP, *shares)
        for row in experiment.settings.rows
        for context, flops, shares in _flops_by_context(experiment.settings, row)
    ]
    columns = [Column("net"), Column("T")]
    columns += [Column("FFN GFLOP", ".1f"), Column("attention GFLOP", ".1f")]
    columns += [Column(f"{name} %", ".1f") for name in SHARES]
    notes = ["papers' convention: FLOP = 2 MAC, blocks alone, 3 T^2 d for the two products of attention"]
    return PaperTable("flops", experiment.settings.title, tuple(columns), tuple(rows), tuple(notes))


def _flops_by_context(settings: Settings, row: str) -> list[tuple[int, PaperFlops, tuple[float, float, float]]]:
    architecture = settings.member(row).architecture
    ffns, simplified = [layer.ffn for layer in architecture.layers], architecture.block_facts.is_shaped
    found = []
    for context in settings.contexts:
        flops = paper_flops(ffns, d_model=architecture.d_model, seq_len=context, simplified=simplified)
        whole = (flops.ffn + flops.attention) / 100
        found.append((context, flops, (flops.ffn / whole, flops.linears / whole, flops.products / whole)))
    return found


def flops_figure(experiment: Experiment) -> PanelFigure:
    """Shares against prompt length, a panel a row."""
    panels = []
    for row in experiment.settings.rows:
        found = _flops_by_context(experiment.settings, row)
        contexts = tuple(float(context) for context, _, _ in found)
        series = tuple(
            Series(name, contexts, tuple(shares[place] for _, _, shares in found)) for place, name in enumerate(SHARES)
        )
        panels.append(LinePanel(row, "tokens of the prompt", "% of FLOPs", series, log_x=True))
    return PanelFigure(experiment.settings.title, tuple(panels))
