"""`python -m nas.plot RUN`: the figures of a run.

pareto         perplexity against latency; beside it the papers' rows for the same depth and prompt, on axes of their
               own, because their perplexities are of another scale, tokenizer and corpus
breakdown      latency and bytes of front and baselines, by kind of op and by layer
sensitivity    their latency against bandwidth and round-trip time, for a protocol that does not have them fitted in
what-if        with --protocol, --network, --testbed, --seq-len or a budget: the run's trials priced anew, and which of
               its picks survive, in a table too; the ledger stays as it is
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from costmodel.config import cli
from costmodel.config.units import parse_bytes, parse_seconds
from costmodel.cost import Budget
from costmodel.estimate import Pricer
from costmodel.protocols import load_pricer
from nas.report.plot_files import plot_costs, plot_front, plot_what_if
from nas.report.reprice_lines import what_if_lines, what_if_table
from nas.report.terminal import table_console
from nas.results.front import front
from nas.results.reprice import what_if
from nas.study.config import StudyConfig
from nas.study.run_folder import find_run, read_config, read_ledger, read_meta, run_pricer


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
    folder = find_run(run)
    config = read_config(folder)
    if (protocol, network, testbed, seq_len, budget_latency, budget_comm) == (None,) * 6:
        _plot_as_run(folder, config)
        return
    budget = Budget(
        latency_s=None if budget_latency is None else parse_seconds(budget_latency, "--budget-latency"),
        sent_bytes=None if budget_comm is None else parse_bytes(budget_comm, "--budget-comm"),
    )
    if protocol in (None, config.protocol):
        pricer = run_pricer(folder, config, network, testbed)
    else:
        pricer = load_pricer(protocol, network, testbed)
    _what_if(folder, config, pricer, config.seq_len if seq_len is None else seq_len, budget)


def _plot_as_run(folder: Path, config: StudyConfig) -> None:
    records, meta = read_ledger(folder), read_meta(folder)
    base = meta.base
    _print_paths(
        plot_front(
            folder,
            records,
            config.budget,
            num_layers=base.num_layers,
            seq_len=config.seq_len,
            floors=meta.floors,
            parent=meta.parent,
        )
    )
    members = front(records, config.budget)
    _print_paths(plot_costs(folder, members, records, base, run_pricer(folder, config), config.seq_len))


def _what_if(folder: Path, config: StudyConfig, pricer: Pricer, seq_len: int, budget: Budget) -> None:
    records, meta = read_ledger(folder), read_meta(folder)
    base = meta.base
    found = what_if(
        records,
        base,
        pricer,
        seq_lens=(config.seq_len, seq_len),
        budgets=(config.budget, budget),
    )
    console = table_console()
    for line in what_if_lines(found, meta.floors):
        console.print(line)
    console.print(what_if_table(found, meta.floors))
    words = [pricer.protocol, *([pricer.network] if pricer.network else []), f"T{seq_len}"]
    suffix = "-" + re.sub(r"[^\w.-]+", "_", "-".join(words))
    _print_paths(plot_what_if(folder, found, suffix, meta.floors))
    _print_paths(plot_costs(folder, found.shown, records, base, pricer, seq_len, suffix))


def _print_paths(paths: Iterable[Path]) -> None:
    for path in paths:
        print(path)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits with its code."""
    cli.run(plot, prog="python -m nas.plot", args=args)


if __name__ == "__main__":
    main()
