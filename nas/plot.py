"""`python -m nas.plot RUN`: the figures of a run.

pareto         perplexity against latency; beside it the papers' rows for the same depth and prompt, on axes of their
               own, because their perplexities are of another scale, tokenizer and corpus
breakdown      latency and bytes of front and baselines, by kind of op and by layer
sensitivity    their latency against bandwidth and round-trip time, for a protocol that does not have them fitted in
what-if        with --protocol, --network, --testbed, --seq-len or a budget: the run's trials priced anew, and which of
               its picks survive, in a table too; the ledger stays as it is
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from costmodel.config import cli
from nas.api import load_run
from nas.report.terminal import table_console


def plot(
    run: str,
    protocol: str | None = None,
    network: str | None = None,
    testbed: Path | None = None,
    seq_len: int | None = None,
    budget_latency: str | None = None,
    budget_comm: str | None = None,
) -> None:
    """Draws a run; with any flag, as it would be under other prices, and says which of its picks survive.

    Args:
        run: folder of a run, or `latest`.
        protocol: price under published, semi2k, aby3 or cheetah, instead of the run's.
        network: loopback, lan (the default), wan or a .yaml file; by default the run's, if the protocol is the run's.
        testbed: compute seconds from `python -m costmodel calibrate`; by default likewise.
        seq_len: tokens of the prompt, instead of the run's.
        budget_latency: most time per token, with a unit, such as 5min; by default none.
        budget_comm: most bytes sent per token, with a unit, such as 8GB; by default none.
    """
    found = load_run(run)
    if (protocol, network, testbed, seq_len, budget_latency, budget_comm) == (None,) * 6:
        return _print_paths(found.plot())
    repriced = found.reprice(
        protocol=protocol,
        network=network,
        testbed=testbed,
        seq_len=seq_len,
        budget_latency=budget_latency,
        budget_comm=budget_comm,
    )
    console = table_console()
    for line in repriced.lines:
        console.print(line)
    console.print(repriced.table)
    return _print_paths(repriced.plot())


def _print_paths(paths: Iterable[Path]) -> None:
    for path in paths:
        print(path)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits with its code."""
    cli.run(plot, prog="python -m nas.plot", args=args)


if __name__ == "__main__":
    main()
