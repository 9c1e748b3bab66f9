"""`python -m costmodel validate`."""

from typing import Literal

from costmodel.calibration.validate_published import checks, derived_terms, fit_errors, flops_published
from costmodel.commands.architectures import row_architecture, row_graph
from costmodel.commands.output import console
from costmodel.config import cli
from costmodel.protocols import published
from costmodel.protocols.published_rows import published_rows
from costmodel.protocols.published_testbed import load_testbed
from costmodel.report import estimates


def validate(protocol: Literal["published"] = "published") -> int:
    """Compare every printed row with its prediction, refit without each row, and check the bars.

    Args:
        protocol: the protocol whose testbed is checked.
    """
    testbed = load_testbed(published.TESTBED)
    pricer = published.load()
    rows = published_rows()
    architectures = {row.name: row_architecture(row) for row in rows}
    counts = {row.name: published.graph_counts(row_graph(row)) for row in rows}
    flops = {
        row.name: flops_published(
            row,
            [layer.ffn for layer in architectures[row.name].layers],
            simplified=architectures[row.name].block == "sas",
        )
        for row in rows
    }
    found = checks(
        rows,
        counts,
        sent_bytes=pricer.sent_bytes,
        latency_s=pricer.latency_s,
        num_flops_wrong=sum(not flops[row.name].matches(row) for row in rows),
    )
    to = console()
    to.print(
        estimates.rows_table(
            rows,
            sent_bytes_errors=fit_errors("sent_bytes", rows, counts, pricer.sent_bytes),
            latency_errors=fit_errors("latency_s", rows, counts, pricer.latency_s),
            flops=flops,
        )
    )
    to.print()
    to.print(estimates.checks_table(found))
    to.print("\nfirst principles (protocol cheetah, GPT-2 small at T=128):")
    to.print(estimates.derived_table(derived_terms(), pricer.sent_bytes))
    to.print("\nidentified by a prior alone:")
    for quantity, constants in (("sent_bytes", testbed.sent_bytes), ("latency_s", testbed.latency_s)):
        for term, constant in constants.items():
            if constant.identified_by == "prior":
                to.print(f"- {quantity} of {term}: {constant.source}")
    to.print("\nnot identified by the rows:")
    for text in testbed.not_identified:
        to.print(f"- {text}")
    return cli.STOPPED if any(not check.passed for check in found) else 0
