"""What `python -m costmodel validate` prints of protocols that others ran: theirs beside ours, never fitted."""

from costmodel.calibration.printed_rows import printed_checks, printed_rows
from costmodel.calibration.validate_published import Check
from costmodel.commands.checks import checks_table
from costmodel.commands.output import console
from costmodel.config import cli
from costmodel.report.tables import table

NOTE = (
    "all parties' bytes of 12 blocks and one norm, SHAFT's with embedding and vocabulary; a factor is of the fitted "
    "row, and stands for what its source counts and computes otherwise; GB without one is GiB"
)


def validate_printed(protocol: str) -> int:
    """Prints the rows of a protocol beside their predictions; gives the exit code."""
    found = printed_checks([row for row in printed_rows() if row.protocol == protocol])
    exact = [each for each in found if each.factor is None]
    held_out = [abs(each.error) for each in found if each.factor is not None and not each.row.fitted]
    figures = [
        *(
            [
                Check(
                    name="rows of no factor that differ",
                    value=sum(not each.is_equal for each in exact) / len(exact),
                    bar=0.0,
                )
            ]
            if exact
            else []
        ),
        *([Check(name=f"bytes, worst of {len(held_out)} held-out rows", value=max(held_out))] if held_out else []),
    ]
    lines = [
        [
            f"{each.row.name} ({'fitted' if each.row.fitted else 'held out'})",
            *(each.row.gigabytes, f"{each.gigabytes:.3f}"),
            "" if each.factor is None else f"{each.factor:.3f}",
            "equal" if each.is_equal else f"{each.error:+.1%}",
        ]
        for each in found
    ]
    to = console()
    to.print(table(["row"], ["GB", "predicted", "factor", "error"], lines))
    to.print(f"- {NOTE}")
    to.print(checks_table(figures))
    return cli.STOPPED if any(not check.passed for check in figures) else 0
