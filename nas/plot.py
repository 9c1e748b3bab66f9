"""`python -m nas.plot RUN`: draws the Pareto front of a run.

The figure shows perplexity against latency. The papers' rows for the same depth and prompt have axes of their own,
because their perplexities are of another scale, tokenizer and corpus.

With --protocol, --network, --testbed, --seq-len or a budget, it prints instead which picks survive at other costs; the
ledger does not change. With several protocols, --protocol semi2k,sigma, it also prints what each member costs under
each, and what the pick of one loses under another.
"""

from functools import partial
from typing import Any

from costmodel.commands.output import console as table_console
from costmodel.config import cli
from nas.report.what_if import loss_lines, picks_table, what_if_lines, what_if_table
from nas.run.reprice import reprice, reprice_each
from nas.run.run import Run


def plot(run: str, **prices: Any) -> None:
    """Draw the front of a run; with any option, print which of its picks survive at other costs instead.

    Args:
        run: folder of a run, or `latest`.
    """
    source = Run.find(run)
    if all(value is None for value in prices.values()):
        from nas.report.plot_files import plot_run  # imported late, because matplotlib is slow

        for path in plot_run(source):
            print(path)
    else:
        console = table_console()
        several = "," in (prices.get("protocol") or "")
        what_ifs = reprice_each(source, prices) if several else (reprice(source, **prices),)
        for what_if in what_ifs:
            for line in what_if_lines(what_if):
                console.print(line)
            console.print(what_if_table(what_if))
        if len(what_ifs) > 1:
            console.print(picks_table(what_ifs))
            for line in loss_lines(what_ifs):
                console.print(line)


main = partial(cli.run, plot, "python -m nas.plot")  # (args=None): runs the command line and exits with its code


if __name__ == "__main__":
    main()
