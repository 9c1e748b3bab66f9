"""`python -m costmodel validate`: compares predictions with printed or logged rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

from rich.table import Table

from costmodel.calibration.printed_rows import PrintedRow, printed_checks, printed_rows
from costmodel.calibration.sigma_rows import SigmaRow, sigma_rows
from costmodel.calibration.validate_published import (
    NOTES,
    PRINTED,
    Check,
    checks,
    derived_terms,
    flops_as_printed,
    held_out_checks,
    left_out_group_checks,
    row_costs,
)
from costmodel.calibration.validate_sigma import checked, sigma_checks
from costmodel.commands.output import console
from costmodel.config import cli
from costmodel.config.units import format_bytes, format_seconds
from costmodel.estimate import estimate
from costmodel.ops import OpGraph
from costmodel.protocols import published
from costmodel.protocols.published import load_testbed
from costmodel.protocols.published_rows import PublishedRow, held_out_rows, published_rows
from costmodel.report.tables import table
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

MENTIONED_SHARE = 0.005  # smaller shares would round to less than 1 %
SIGMA_NOTE = (
    "the blocks alone. Logs (loopback): seconds that were computed, waiting for bytes left out; medians of 3 to 6 runs "
    "on one machine. Printed: of other GPUs than the fit's, over the link named"
)
PRINTED_NOTE = (
    "all parties' bytes of 12 blocks and one norm, SHAFT's with embedding and vocabulary; a factor is of the fitted "
    "row, and stands for what its source counts and computes otherwise; GB without one is GiB"
)

Validation: TypeAlias = tuple[list[Table | str], Sequence[Check]]


def validate(protocol: Literal["published", "sigma", "crypten", "aby3", "cheetah"] = "published") -> int:
    """Compare every printed or logged row with its prediction and its error bound; refit `published` without each row.

    Held-out rows are never fitted, not even by this command.

    Args:
        protocol: protocol whose testbed is checked; for crypten, aby3 and cheetah, the bytes that other papers print.
    """
    parts, figures = VALIDATIONS[protocol]()
    to = console()
    for part in parts:
        to.print(part)
    return cli.STOPPED if any(not check.passed for check in figures) else 0


def _published() -> Validation:
    testbed = load_testbed(published.TESTBED)
    pricer = published.load()
    rows = published_rows()
    counts, costs = _counts(rows), _costs(rows, pricer)
    wrong = [row for row in rows if flops_as_printed(row, costs[row.name]) != (row.ffn_gflop, row.attention_gflop)]
    figures = checks(rows, counts, sent_bytes=pricer.sent_bytes, latency_s=pricer.latency_s, num_flops_wrong=len(wrong))
    held_out = held_out_rows()
    held_out_counts = _counts(held_out)
    values = {"sent_bytes": pricer.sent_bytes, "latency_s": pricer.latency_s}
    unfitted = [*held_out_checks(held_out, held_out_counts, values), *left_out_group_checks(rows, counts)]
    parts: list[Table | str] = [
        _rows_table(rows, costs),
        "",
        checks_table(figures),
        "\nheld out, never fitted:",
        _rows_table(held_out, _costs(held_out, pricer)),
        "",
        checks_table(unfitted),
        *(f"- {note}" for note in NOTES),
        "\nfirst principles (protocol cheetah, GPT-2 small at T=128):",
        _derived_table(pricer.sent_bytes),
        "\nidentified by a prior alone:",
        *(
            f"- {quantity} of {term}: {constant.source}"
            for quantity in values
            for term, constant in getattr(testbed, quantity).items()
            if constant.identified_by == "prior"
        ),
        "\nnot identified by the rows:",
        *(f"- {text}" for text in testbed.not_identified),
    ]
    return parts, tuple(figures)


def row_graph(row: PublishedRow) -> OpGraph:
    """Return the op graph of a printed row."""
    dimensions = Dimensions(layers=row.num_layers, heads=row.num_heads, d_model=row.d_model, vocab=row.vocab_size)
    return lower(parse(row.notation, base_architecture("gpt2-small", dimensions)).architecture, row.seq_len)


def _counts(rows: Iterable[PublishedRow]) -> dict[str, dict[str, int]]:
    return {row.name: published.graph_counts(row_graph(row)) for row in rows}


def _costs(rows: Iterable[PublishedRow], pricer: published.Published) -> dict[str, dict[str, float]]:
    graphs = {row.name: row_graph(row) for row in rows}
    return {name: row_costs(graph, estimate(graph, pricer).total) for name, graph in graphs.items()}


def _rows_table(rows: Sequence[PublishedRow], costs: Mapping[str, Mapping[str, float]]) -> Table:
    lines = []
    for row in rows:
        line = [row.name]
        for what in ("communication GB", "latency min"):
            printed, ours = getattr(row, PRINTED[what]), costs[row.name][what]
            line += [str(printed), f"{ours:.2f}", f"{ours / float(printed) - 1:+.2%}"]
        ffn, attention = flops_as_printed(row, costs[row.name])
        differs = "" if (ffn, attention) == (row.ffn_gflop, row.attention_gflop) else " (not as printed)"
        lines.append([*line, f"{ffn}", f"{attention}{differs}"])
    numbers = ["GB", "predicted", "error", "min", "predicted", "error", "FFN GFLOP", "attention GFLOP"]
    return table(["row"], numbers, lines)


def _derived_table(sent_bytes: Mapping[str, float]) -> Table:
    lines = []
    for term in derived_terms():
        parts = sorted(term.by_primitive.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= MENTIONED_SHARE)
        lines.append([term.title, f"{sent_bytes[term.term]:.1f}", f"{term.sent_bytes:.1f}", shares])
    shown = table(["bytes per unit of"], ["fitted", "derived", "of the derived bytes"], lines)
    shown.columns[-1].justify = "left"
    return shown


def _sigma() -> Validation:
    predictions = [checked(row) for row in sigma_rows()]
    figures, lines = sigma_checks(predictions), []
    for prediction in predictions:
        row, seconds = prediction.row, ["", "", "", ""]
        if prediction.seconds is not None:
            told_s, predicted_s, low, high = map(format_seconds, prediction.seconds)
            seconds = [told_s, predicted_s, f"{prediction.seconds.error:+.1%}", f"{low} to {high}"]
        told = f"{row.sent_bytes:,}" if row.sent_bytes else f"{row.sent_gibibytes or ''} GiB".removeprefix(" GiB")
        lines.append(
            [
                _row_title(row),
                *(told, "equal" if prediction.bytes_match else f"{prediction.sent_bytes:,}"),
                *(format_bytes(prediction.key_bytes), f"{prediction.gpu_rounds:,}"),
                *seconds,
            ]
        )
    numbers = ["bytes", "formulas", "keys a party", "rounds on GPUs", "seconds", "predicted", "error", "range"]
    return [table(["row"], numbers, lines), f"- {SIGMA_NOTE}", checks_table(figures)], figures


def _printed(protocol: str) -> Validation:
    """Compare the bytes that others print for a protocol, which no fit uses, with predictions."""
    row_checks = printed_checks([row for row in printed_rows() if row.protocol == protocol])
    exact = [not check.is_equal for check in row_checks if check.factor is None]
    held_out = [abs(check.error) for check in row_checks if check.factor is not None and not check.row.fitted]
    figures = []
    if exact:
        figures.append(Check("rows of no factor that differ", sum(exact) / len(exact), 0.0))
    if held_out:
        figures.append(Check(f"bytes, worst of {len(held_out)} held-out rows", max(held_out)))
    lines = [
        [
            _row_title(check.row),
            *(check.row.gigabytes, f"{check.gigabytes:.3f}"),
            "" if check.factor is None else f"{check.factor:.3f}",
            "equal" if check.is_equal else f"{check.error:+.1%}",
        ]
        for check in row_checks
    ]
    shown = table(["row"], ["GB", "predicted", "factor", "error"], lines)
    return [shown, f"- {PRINTED_NOTE}", checks_table(figures)], figures


def _row_title(row: SigmaRow | PrintedRow) -> str:
    return f"{row.name} ({'fitted' if row.fitted else 'held out'})"


def checks_table(figures: Iterable[Check]) -> Table:
    """Tabulate figures with their bounds: pass, FAIL, or only reported."""
    return table(
        ["figure"],
        ["value", "bar", "verdict"],
        [
            (check.name, f"{check.value:.2%}", "" if check.bar is None else f"{check.bar:.1%}", verdict(check))
            for check in figures
        ],
    )


def verdict(check: Check) -> str:
    return "" if check.bar is None else "pass" if check.passed else "FAIL"


# protocol -> its printed comparison, and the figures that must pass
VALIDATIONS: dict[str, Callable[[], Validation]] = {
    "published": _published,
    "sigma": _sigma,
    **{name: partial(_printed, name) for name in ("crypten", "aby3", "cheetah")},
}
