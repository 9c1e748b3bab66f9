"""`python -m costmodel validate`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

from rich.table import Table

from costmodel.calibration.second_opinion import Opinion, opinions
from costmodel.calibration.validate_published import (
    NOTES,
    RowCounts,
    RowFlops,
    checks,
    derived_terms,
    fit_errors,
    flops_published,
    held_out_checks,
    left_out_group_checks,
)
from costmodel.commands.checks import checks_table, verdict
from costmodel.commands.output import console
from costmodel.commands.validate_printed import validate_printed
from costmodel.commands.validate_sigma import validate_sigma
from costmodel.config import cli
from costmodel.config.units import format_bytes
from costmodel.ops import OpGraph
from costmodel.protocols import published
from costmodel.protocols.published_rows import PublishedRow, held_out_rows, published_rows
from costmodel.protocols.published_testbed import load_testbed
from costmodel.report.tables import table
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

MENTIONED_SHARE = 0.005  # what rounds to less than 1 % is left out


def validate(protocol: Literal["published", "sigma", "crypten", "aby3", "cheetah"] = "published") -> int:
    """Compare every printed or logged row with its prediction, and check the bars; refit `published` without each row.

    Rows that are held out were never fitted, and are not by this command.

    Args:
        protocol: the protocol whose testbed is checked; of crypten, aby3 and cheetah, bytes that others print.
    """
    return VALIDATIONS[protocol]()


def _published() -> int:
    testbed = load_testbed(published.TESTBED)
    pricer = published.load()
    rows = published_rows()
    counts, flops = _counts(rows), _flops(rows)
    figures = checks(
        rows,
        counts,
        sent_bytes=pricer.sent_bytes,
        latency_s=pricer.latency_s,
        num_flops_wrong=sum(not flops[row.name].matches(row) for row in rows),
    )
    second = opinions()
    held_out = held_out_rows()
    held_out_counts = _counts(held_out)
    values = {"sent_bytes": pricer.sent_bytes, "latency_s": pricer.latency_s}
    unfitted = [*held_out_checks(held_out, held_out_counts, values), *left_out_group_checks(rows, counts)]
    parts: list[Table | str] = [
        _rows_table(rows, counts, flops, pricer),
        "",
        checks_table(figures),
        "\nheld out, never fitted:",
        _rows_table(held_out, held_out_counts, _flops(held_out), pricer),
        "",
        checks_table(unfitted),
        *(f"- {note}" for note in NOTES),
        "\nfirst principles (protocol cheetah, GPT-2 small at T=128):",
        _derived_table(pricer.sent_bytes),
        "\nsecond opinion (MP-SPDZ 0.4.2 at compile time, protocols semi2k and aby3; other fraction and sign bits):",
        _opinions_table(second),
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
    to = console()
    for part in parts:
        to.print(part)
    return cli.STOPPED if any(not check.passed for check in (*figures, *(opinion.check for opinion in second))) else 0


def row_graph(row: PublishedRow) -> OpGraph:
    """The op graph of a printed row."""
    return lower(_architecture(row), row.seq_len)


def _architecture(row: PublishedRow) -> Architecture:
    dimensions = Dimensions(layers=row.num_layers, heads=row.num_heads, d_model=row.d_model, vocab=row.vocab_size)
    return parse(row.notation, base_architecture("gpt2-small", dimensions)).architecture


def _counts(rows: Iterable[PublishedRow]) -> dict[str, dict[str, int]]:
    return {row.name: published.graph_counts(row_graph(row)) for row in rows}


def _flops(rows: Iterable[PublishedRow]) -> dict[str, RowFlops]:
    flops = {}
    for row in rows:
        whole = _architecture(row)
        ffns, simplified = [layer.ffn for layer in whole.layers], whole.block_facts.is_shaped
        flops[row.name] = flops_published(row, ffns, simplified=simplified)
    return flops


def _rows_table(
    rows: Sequence[PublishedRow], counts: RowCounts, flops: Mapping[str, RowFlops], pricer: published.Published
) -> Table:
    """Every printed row: printed and predicted communication and latency, FLOPs, errors in percent."""
    byte_errors = fit_errors("sent_bytes", rows, counts, pricer.sent_bytes)
    latency_errors = fit_errors("latency_s", rows, counts, pricer.latency_s)
    lines = []
    for row, byte_error, latency_error in zip(rows, byte_errors, latency_errors, strict=True):
        ours = flops[row.name]
        lines.append(
            [
                row.name,
                str(row.sent_gigabytes),
                f"{float(row.sent_gigabytes) * (1 + byte_error):.2f}",
                f"{byte_error:+.2%}",
                str(row.latency_min),
                f"{float(row.latency_min) * (1 + latency_error):.2f}",
                f"{latency_error:+.2%}",
                f"{ours.ffn_gflop}",
                f"{ours.attention_gflop}{'' if ours.matches(row) else ' (not as printed)'}",
            ]
        )
    numbers = ["GB", "predicted", "error", "min", "predicted", "error", "FFN GFLOP", "attention GFLOP"]
    return table(["row"], numbers, lines)


def _derived_table(sent_bytes: Mapping[str, float]) -> Table:
    """Fitted bytes per unit beside those of the formulas, and which primitives send the latter."""
    lines = []
    for term in derived_terms():
        parts = sorted(term.by_primitive.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= MENTIONED_SHARE)
        lines.append([term.title, f"{sent_bytes[term.term]:.1f}", f"{term.sent_bytes:.1f}", shares])
    shown = table(["bytes per unit of"], ["fitted", "derived", "of the derived bytes"], lines)
    shown.columns[-1].justify = "left"
    return shown


def _opinions_table(second: Iterable[Opinion]) -> Table:
    """Another framework's bytes of the same op, beside the formulas', and how far apart they are."""
    return table(
        ["bytes of all parties"],
        ["MP-SPDZ", "here", "ratio", "bar", "verdict"],
        [
            (
                opinion.title,
                format_bytes(opinion.other_bytes),
                format_bytes(opinion.own_bytes),
                f"{opinion.own_bytes / opinion.other_bytes:.2f}",
                "" if opinion.bar is None else f"{opinion.bar:.0%}",
                verdict(opinion.check),
            )
            for opinion in second
        ],
    )


# protocol -> what prints how its testbed does, and gives the exit code
VALIDATIONS: dict[str, Callable[[], int]] = {
    "published": _published,
    "sigma": validate_sigma,
    **{name: partial(validate_printed, name) for name in ("crypten", "aby3", "cheetah")},
}
