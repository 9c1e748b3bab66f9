"""`python -m costmodel validate`: compares the predictions of `published` with the papers' printed rows."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rich.table import Table

from costmodel import ops
from costmodel.config import cli
from costmodel.config.files import load_file
from costmodel.config.units import BYTES, SECONDS
from costmodel.estimate import estimate
from costmodel.ops import OpGraph
from costmodel.protocols import published
from costmodel.protocols.published import held_out_rows, published_rows
from costmodel.report.tables import print_blocks, table
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

# Bounds of relative errors on fitted rows; the fit bounds the bytes of the papers' own method alone.
OWN_BYTES_BAR, LATENCY_BAR = 0.005, 0.05
NOTES = (
    "HH: the block of He and Hofmann, whose bytes have no bound in the fit",
    "fused FFNs of 12 layers at T=512 have 7.248 GFLOP; the papers print 7.3, an eighth of the rounded 58.0",
)


class PrintedFigure(NamedTuple):
    """A number as a paper prints it, and ours as predicted or counted.

    bar: Greatest relative error that passes; 0 to require equality to the last printed digit, None to pass any error.
    """

    printed: str
    ours: float
    bar: float | None

    @property
    def error(self) -> float:
        return self.ours / float(self.printed) - 1

    @property
    def rounded(self) -> str:
        """Our number with as many decimal places as the printed one."""
        return f"{self.ours:.{len(self.printed.partition('.')[2])}f}"

    @property
    def passed(self) -> bool:
        return self.bar is None or self.rounded == self.printed or abs(self.error) <= self.bar


class PrintedRow(NamedTuple):
    """The figures of one printed row, by name. use: `fitted` or `held out`, then `, HH` in He and Hofmann's block."""

    name: str
    use: str
    figures: dict[str, PrintedFigure]


def validate() -> int:
    """Print every row of the papers beside the prediction of `published`, and the greatest errors with their bounds.

    A figure passes if it is equal to the last printed digit, its error is within the bound, or it has no bound, as in
    held-out rows, which were never fitted. If one fails, the exit code is 1.
    """
    rows = compared_with_papers()
    testbed = load_file(published.Testbed, published.TESTBED)
    notes = (*NOTES, *(f"not identified by the rows: {text}" for text in testbed.not_identified))
    print_blocks([], [rows_table(rows), errors_table(rows)])
    print_blocks(["", *(f"- {note}" for note in notes)], [])
    return 0 if all(figure.passed for row in rows for figure in row.figures.values()) else cli.STOPPED


def compared_with_papers() -> list[PrintedRow]:
    """Return the rows of the papers that `published` is fitted to, and those held out of the fit, with our numbers."""
    pricer, rows = published.load(), []
    for row in (*published_rows(), *held_out_rows()):
        dimensions = Dimensions(layers=row.num_layers, heads=row.num_heads, d_model=row.d_model, vocab=row.vocab_size)
        graph = lower(parse(row.notation, base_architecture("gpt2-small", dimensions)).architecture, row.seq_len)
        total, (ffn, attention) = estimate(graph, pricer).total, paper_flops(graph)
        own, fitted = row.own_method, not row.held_out
        figures = {
            "communication GB": (row.sent_gigabytes, total.sent_bytes / BYTES["GB"], OWN_BYTES_BAR if own else None),
            "latency min": (row.latency_min, total.latency_s / SECONDS["min"], LATENCY_BAR),
            "FFN GFLOP": (row.ffn_gflop, ffn / 1e9, 0.0),
            "attention GFLOP": (row.attention_gflop, attention / 1e9, 0.0),
        }
        compared = {
            what: PrintedFigure(str(printed), ours, bar if fitted else None)
            for what, (printed, ours, bar) in figures.items()
        }
        use = f"{'fitted' if fitted else 'held out'}{'' if own else ', HH'}"
        rows.append(PrintedRow(row.name, use, compared))
    return rows


def paper_flops(graph: OpGraph) -> tuple[int, int]:
    """Return the FLOPs of FFNs and of attention in the papers' convention; a multiplication and its addition are 2.

    Embedding and vocabulary projection are not counted. The two T x T products of attention count by 3/4. In He and
    Hofmann's block they count by 2/4, and the first layer's value projection is not counted. Source: derived
    from every printed digit of arXiv 2410.13060 table 3.
    """
    is_shaped = any(isinstance(node.op, ops.ShapedAttention) for node in graph)
    ffn = attention = 0
    for node in graph:
        if isinstance(node.op, ops.Linear):
            flops = 2 * node.op.rows * node.op.in_features * node.op.out_features
            if ".ffn." in node.name:
                ffn += flops
            elif not (is_shaped and node.name.endswith("attention.v")):
                attention += flops
        elif isinstance(node.op, ops.AttentionMix):
            attention += (2 if is_shaped else 3) * node.op.heads * node.op.queries * node.op.keys * node.op.head_dim
    return ffn, attention


def rows_table(rows: Sequence[PrintedRow]) -> Table:
    """Return a table of the printed numbers, each with our number and its relative error if the two differ."""
    lines = []
    for row in rows:
        cells = []
        for figure in row.figures.values():
            same = figure.rounded == figure.printed
            ours = "equal" if same else f"ours {figure.rounded}, {figure.error:+.2%}"
            cells.append(f"{figure.printed} ({ours}{'' if figure.passed else ', FAIL'})")
        lines.append([row.name, row.use, *cells])
    return table(["row", "use"], list(rows[0].figures), lines)


def errors_table(rows: Sequence[PrintedRow]) -> Table:
    """Return a table of the errors of each figure over the rows of each `use`, and whether all of them pass."""
    groups: dict[tuple[str, str], list[PrintedFigure]] = {}
    for row in rows:
        for what, figure in row.figures.items():
            groups.setdefault((what, row.use), []).append(figure)
    lines = []
    for (what, use), figures in groups.items():
        errors, bar = [abs(figure.error) for figure in figures], figures[0].bar
        verdict = "" if bar is None else "pass" if all(figure.passed for figure in figures) else "FAIL"
        equal = str(sum(figure.rounded == figure.printed for figure in figures))
        bound = "" if bar is None else f"{bar:.1%}" if bar else "equal"
        shown = f"{fmean(errors):.2%}", f"{max(errors):.2%}", bound
        lines.append([what, use, str(len(figures)), equal, *shown, verdict])
    return table(["figure", "use"], ["rows", "equal", "mean error", "greatest", "bound", "verdict"], lines)
