"""`python -m nas.plot RUN`: draws the Pareto front of a run.

Rows of the papers' tables have separate axes, since their perplexities are of another scale, tokenizer and corpus. If
an option is given, the command prints how the front changes at other costs instead; the ledger does not change.
"""

from functools import partial
from typing import Any

from costmodel.config import cli
from costmodel.report.tables import console as table_console
from nas.report.what_if import reprice, what_if_lines, what_if_table
from nas.run.run import Run


def plot(run: str, **prices: Any) -> None:
    """Draw the front of a run or, if another option is given, print how the front changes at other costs.

    Args:
        run: folder of a run, or `latest`.
    """
    source = Run.find(run)
    if all(value is None for value in prices.values()):
        from nas.report.draw import plot_run  # imported late, because matplotlib is slow

        for path in plot_run(source):
            print(path)
    else:
        console, what_if = table_console(), reprice(source, **prices)
        for line in what_if_lines(what_if):
            console.print(line)
        console.print(what_if_table(what_if))


main = partial(cli.run, plot, "python -m nas.plot")  # (args=None): runs the command line and exits with its code


if __name__ == "__main__":
    main()
