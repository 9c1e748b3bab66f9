"""What `python -m costmodel validate --protocol sigma` prints."""

from collections.abc import Iterable

from rich.table import Table

from costmodel.calibration.sigma_rows import sigma_rows
from costmodel.calibration.validate_sigma import Checked, checked, sigma_checks
from costmodel.commands.checks import checks_table
from costmodel.commands.output import console
from costmodel.config import cli
from costmodel.config.units import format_bytes, format_seconds
from costmodel.report.tables import table

NOTE = (
    "the blocks alone. Logs (loopback): seconds that were computed, waiting for bytes left out; medians of 3 to 6 runs "
    "on one machine. Printed: of other GPUs than the fit's, over the link named"
)


def validate_sigma() -> int:
    """Prints every row beside its prediction, and the bars; gives the exit code."""
    found = [checked(row) for row in sigma_rows()]
    figures = sigma_checks(found)
    to = console()
    to.print(_rows_table(found))
    to.print(f"- {NOTE}")
    to.print(checks_table(figures))
    return cli.STOPPED if any(not check.passed for check in figures) else 0


def _rows_table(found: Iterable[Checked]) -> Table:
    lines = []
    for each in found:
        row, seconds = each.row, ["", "", "", ""]
        if each.told_s is not None and each.latency_s is not None and each.latency_s_range is not None:
            low, high = map(format_seconds, each.latency_s_range)
            seconds = [
                format_seconds(each.told_s),
                format_seconds(each.latency_s),
                f"{each.error:+.1%}",
                f"{low} to {high}",
            ]
        told = f"{row.sent_bytes:,}" if row.sent_bytes else f"{row.sent_gibibytes or ''} GiB".removeprefix(" GiB")
        lines.append(
            [
                f"{row.name} ({'fitted' if row.fitted else 'held out'})",
                *(told, "equal" if each.bytes_match else f"{each.sent_bytes:,}"),
                *(format_bytes(each.key_bytes), f"{each.gpu_rounds:,}"),
                *seconds,
            ]
        )
    numbers = ["bytes", "formulas", "keys a party", "rounds on GPUs", "seconds", "predicted", "error", "range"]
    return table(["row"], numbers, lines)
