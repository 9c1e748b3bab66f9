"""`python -m nas.status RUN`: where a run stands, from its ledger alone."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.table import Table

from costmodel.config import cli
from costmodel.config.bugs import TRACEBACK_FILE
from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Budget
from nas.corpus.ngrams import NgramBaseline
from nas.report.ngram_lines import mark, ngram_lines
from nas.report.price_lines import price_line
from nas.report.progress import line
from nas.report.seed_words import IN_NOISE, SPREAD, perplexity_text, unstable_lines
from nas.report.summary import infeasible_lines, parent_lines
from nas.report.terminal import table_console
from nas.results import ledger
from nas.results.front import crosses, num_planned, summarise
from nas.results.ledger import Record
from nas.results.members import TrainedMember, in_noise
from nas.storage import is_running
from nas.study.run_folder import find_run, read_config, read_ledger, read_meta


def status(run: str) -> None:
    """Shows counts, hypervolume, front and the trials that did not complete.

    Args:
        run: folder of a run, or `latest`.
    """
    folder = find_run(run)
    config, meta = read_config(folder), read_meta(folder)
    with warnings.catch_warnings(record=True) as caught:
        records = read_ledger(folder)
    console = table_console()
    for warning in caught:
        console.print(f"warning: {warning.message}")
    summary = summarise(records, config.budget, meta.reference, finalist_seeds=config.finalist_seeds)
    planned = num_planned(records, config.num_trials)
    console.print(f"run {folder}: space {config.space}, budget {config.budget_latency}, scale {config.scale}")
    console.print(f"perplexities are of {meta.tokenizer}, {meta.split}")
    for told in (*ngram_lines(meta.ngrams), *parent_lines(meta.parent, summary.front)):
        console.print(told)
    live = is_running(folder)
    console.print(line(summary, planned, eta_s=None, live=live, ngrams=meta.ngrams))
    if not live and (summary.ended < planned or summary.seeds_left):
        console.print(f"nothing is running; continue with python -m nas.search --resume {folder}")
    if summary.front:
        console.print(price_line(summary.front, meta.base, config.protocol, config.workload))
        console.print(_front_table(summary.front, config.budget, meta.ngrams))
    for told in (*infeasible_lines(records, config.budget), *unstable_lines(records)):
        console.print(told)
    for record in ledger.finished(records):
        if record.reason:
            console.print(f"{record.status}: {record.notation} ({record.trial_id}): {record.reason}")
            if traceback := _traceback(folder, record):
                console.print(f"  traceback: {traceback}")


def _traceback(folder: Path, record: Record) -> Path | None:
    """Where the traceback of a trial is, unless its reason says so or there is none."""
    path = folder / "trials" / record.trial_id / TRACEBACK_FILE
    return path if path.exists() and str(path) not in (record.reason or "") else None


def _front_table(members: tuple[TrainedMember, ...], budget: Budget, ngrams: NgramBaseline | None) -> Table:
    marks = [mark(member.mean_loss, ngrams) for member in members]
    table = Table(title=f"Pareto front; {SPREAD}; ~ {IN_NOISE}; * its price range crosses the budget")
    headings = ["arch_id", "architecture", "runs as", "perplexity", "latency", "sent", "tokens"]
    for heading in headings + ["floor"] * any(marks):
        table.add_column(heading, overflow="fold")
    for member, inside, marked in zip(members, in_noise(members), marks, strict=True):
        table.add_row(
            member.arch_id,
            member.notation,
            member.deployed or "as written",
            perplexity_text(member) + (" ~" if inside else ""),
            format_seconds(member.latency_s) + (" *" if crosses(member, budget) else ""),
            format_bytes(member.sent_bytes),
            f"{member.first.tokens:,}",
            *([marked] if any(marks) else []),
        )
    return table


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits with its code."""
    cli.run(status, prog="python -m nas.status", args=args)


if __name__ == "__main__":
    main()
