"""Figures with their bars, as tables."""

from collections.abc import Iterable

from rich.table import Table

from costmodel.calibration.validate_published import Check
from costmodel.report.tables import table


def checks_table(figures: Iterable[Check]) -> Table:
    """Figures with their bars: pass, FAIL, or reported only."""
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
