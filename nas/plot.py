"""`python -m nas.plot RUN`: the figures of a run.

pareto         perplexity against latency; beside it the papers' rows for the same depth and prompt, on axes of their
               own, because their perplexities are of another scale, tokenizer and corpus
breakdown      latency and bytes of front and baselines, by kind of op and by layer
sensitivity    their latency against bandwidth and round-trip time, for a protocol that does not have them fitted in
what-if        with --protocol, --network, --testbed, --seq-len or a budget: the run's trials priced anew, and which of
               its picks survive, in a table too; the ledger stays as it is. With several protocols, --protocol
               semi2k,sigma, also what each member costs under each, and what the pick of one loses under another
"""

from functools import partial
from typing import Any

from costmodel.config import cli
from nas.report.plot_files import plot_run, plot_what_if
from nas.report.terminal import table_console
from nas.report.what_if import loss_lines, picks_table, what_if_lines, what_if_table
from nas.run.reprice import reprice, reprice_each
from nas.run.run import Run


def plot(run: str, **prices: Any) -> None:
    """Draws a run; with any flag, as it would be under other prices, and says which of its picks survive.

    Args:
        run: folder of a run, or `latest`.
    """
    source = Run.find(run)
    if all(value is None for value in prices.values()):
        paths = plot_run(source)
    else:
        console, paths = table_console(), ()
        several = "," in (prices.get("protocol") or "")
        what_ifs = reprice_each(source, prices) if several else (reprice(source, **prices),)
        for what_if in what_ifs:
            for line in what_if_lines(what_if):
                console.print(line)
            console.print(what_if_table(what_if))
            paths += plot_what_if(what_if)
        if len(what_ifs) > 1:
            console.print(picks_table(what_ifs))
            for line in loss_lines(what_ifs):
                console.print(line)
    for path in paths:
        print(path)


main = partial(cli.run, plot, "python -m nas.plot")  # (args=None): runs the command line and exits with its code


if __name__ == "__main__":
    main()
