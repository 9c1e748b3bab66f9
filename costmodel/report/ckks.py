"""Formats comparisons of `ckks` with a library as a table, JSON and records."""

from typing import Any

from rich.table import Table

from costmodel.calibration.ckks_compare import SECONDS_BAR, STATED_ERROR, CkksComparison
from costmodel.config.units import format_seconds
from costmodel.engine.ckks_library import PACKAGE, VERSION
from costmodel.report.tables import table


def records(comparison: CkksComparison) -> list[dict[str, Any]]:
    """Return a record for each primitive, and for bootstraps."""
    return [
        {
            "primitive": name,
            "predicted": count,
            "measured": comparison.measured.get(name, 0),
            "predicted_s": comparison.predicted_s.get(name, 0.0),
            "measured_s": comparison.measured_s.get(name, 0.0),
        }
        for name, count in comparison.predicted.items()
    ]


def document(comparison: CkksComparison) -> dict[str, Any]:
    return {
        "protocol": "ckks",
        "library": f"{PACKAGE} {VERSION}",
        "slots": comparison.slots,
        "levels": comparison.levels,
        "primitives": records(comparison),
        "seconds_error": comparison.seconds_error,
        "logits_max_abs_error": comparison.logits_max_abs_error,
        "bootstraps_saved_over_the_whole_graph": comparison.saved,
        "passed": comparison.passed,
    }


def summary(comparison: CkksComparison, heading: str) -> list[str]:
    counts = "equal" if comparison.predicted == comparison.measured else "NOT equal"
    seconds = format_seconds(sum(comparison.predicted_s.values())), format_seconds(sum(comparison.measured_s.values()))
    return [
        f"{heading}; protocol ckks under {PACKAGE} {VERSION}, {comparison.slots} slots, {comparison.levels} levels",
        f"counts are {counts}; seconds of the CPU: predicted {seconds[0]}, measured {seconds[1]} "
        f"({comparison.seconds_error:+.1%}, bound {SECONDS_BAR:.0%})",
        f"logits differ from plaintext by at most {comparison.logits_max_abs_error:.2g} (bound {STATED_ERROR:g}); "
        f"placing bootstraps over the whole graph would save {comparison.saved}",
    ]


def comparison_table(comparison: CkksComparison) -> Table:
    lines = [
        [one["primitive"].replace("_", " "), str(one["predicted"]), str(one["measured"])]
        + [format_seconds(one[name]) for name in ("predicted_s", "measured_s")]
        for one in records(comparison)
    ]
    return table(["primitive"], ["predicted", "measured", "predicted s", "measured s"], lines)
