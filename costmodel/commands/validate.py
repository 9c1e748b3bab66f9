"""`python -m costmodel validate`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from rich.table import Table

from costmodel.calibration.held_out import NOTES, held_out_checks, left_out_group_checks
from costmodel.calibration.second_opinion import opinions
from costmodel.calibration.validate_published import (
    RowCounts,
    RowFlops,
    checks,
    derived_terms,
    fit_errors,
    flops_published,
)
from costmodel.commands.output import console
from costmodel.commands.printed_rows import row_architecture, row_graph
from costmodel.config import cli
from costmodel.protocols import published
from costmodel.protocols.published_rows import PublishedRow, held_out_rows, published_rows
from costmodel.protocols.published_testbed import load_testbed
from costmodel.report import estimates


def validate(protocol: Literal["published"] = "published") -> int:
    """Compare every printed row with its prediction, refit without each row, and check the bars.

    Rows that are held out were never fitted, and are not by this command.

    Args:
        protocol: the protocol whose testbed is checked.
    """
    testbed = load_testbed(published.TESTBED)
    pricer = published.load()
    rows = published_rows()
    counts, flops = _counts(rows), _flops(rows)
    found = checks(
        rows,
        counts,
        sent_bytes=pricer.sent_bytes,
        latency_s=pricer.latency_s,
        num_flops_wrong=sum(not flops[row.name].matches(row) for row in rows),
    )
    to = console()
    to.print(_table(rows, counts, flops, pricer))
    to.print()
    to.print(estimates.checks_table(found))
    _print_held_out(rows, counts, pricer)
    to.print("\nfirst principles (protocol cheetah, GPT-2 small at T=128):")
    to.print(estimates.derived_table(derived_terms(), pricer.sent_bytes))
    second = opinions()
    to.print(
        "\nsecond opinion (MP-SPDZ 0.4.2 at compile time, protocols semi2k and aby3; other fraction and sign bits):"
    )
    to.print(estimates.opinions_table(second))
    to.print("\nidentified by a prior alone:")
    for quantity, constants in (("sent_bytes", testbed.sent_bytes), ("latency_s", testbed.latency_s)):
        for term, constant in constants.items():
            if constant.identified_by == "prior":
                to.print(f"- {quantity} of {term}: {constant.source}")
    to.print("\nnot identified by the rows:")
    for text in testbed.not_identified:
        to.print(f"- {text}")
    return cli.STOPPED if any(not check.passed for check in (*found, *(one.check for one in second))) else 0


def _print_held_out(rows: Sequence[PublishedRow], counts: RowCounts, pricer: published.Published) -> None:
    held_out = held_out_rows()
    others = _counts(held_out)
    values = {"sent_bytes": pricer.sent_bytes, "latency_s": pricer.latency_s}
    to = console()
    to.print("\nheld out, never fitted:")
    to.print(_table(held_out, others, _flops(held_out), pricer))
    to.print()
    to.print(estimates.checks_table([*held_out_checks(held_out, others, values), *left_out_group_checks(rows, counts)]))
    for note in NOTES:
        to.print(f"- {note}")


def _counts(rows: Iterable[PublishedRow]) -> dict[str, dict[str, int]]:
    return {row.name: published.graph_counts(row_graph(row)) for row in rows}


def _flops(rows: Iterable[PublishedRow]) -> dict[str, RowFlops]:
    found = {}
    for row in rows:
        made = row_architecture(row)
        found[row.name] = flops_published(row, [layer.ffn for layer in made.layers], simplified=made.block == "sas")
    return found


def _table(
    rows: Sequence[PublishedRow], counts: RowCounts, flops: Mapping[str, RowFlops], pricer: published.Published
) -> Table:
    return estimates.rows_table(
        rows,
        sent_bytes_errors=fit_errors("sent_bytes", rows, counts, pricer.sent_bytes),
        latency_errors=fit_errors("latency_s", rows, counts, pricer.latency_s),
        flops=flops,
    )
