"""`python -m nas.status RUN`: shows the state of a run, from the files in its folder."""

import warnings
from functools import partial

from rich.table import Table

from costmodel.config import cli
from costmodel.config.bugs import TRACEBACK_FILE
from costmodel.config.units import format_bytes, format_seconds
from costmodel.report.tables import console as table_console
from nas.report import summary
from nas.report.progress import line
from nas.run.members import crosses, in_noise
from nas.run.run import Run
from nas.storage import is_running
from search_spaces.budget.feasible import format_budget, format_price


def status(run: str) -> None:
    """Show the number of trials by result, the hypervolume, the front and the trials that did not complete.

    Args:
        run: folder of a run, or `latest`.
    """
    with warnings.catch_warnings(record=True) as caught:
        shown = Run.find(run)
    config, meta, folder, counts = shown.config, shown.meta, shown.folder, shown.summary
    console = table_console()
    for warning in caught:
        console.print(f"warning: {warning.message}")
    console.print(f"run {folder}: space {config.space}, budget {format_budget(config.budget)}, scale {config.scale}")
    console.print(f"perplexities are of {meta.tokenizer}, {meta.split}")
    if shown.is_proxy:
        console.print(
            f"costs are those of width {shown.base.d_model}; perplexities, of models trained at width "
            f"{shown.completed[0].width}, only rank candidates (docs/priced-trained-run.md)"
        )
    for text in (*summary.ngram_lines(meta.ngrams), *summary.parent_lines(shown)):
        console.print(text)
    live = is_running(folder)
    console.print(line(shown, eta_s=None, live=live))
    if not live and (counts.ended < shown.num_planned or counts.seeds_left):
        console.print(f"nothing is running; continue with python -m nas.search --resume {folder}")
    if shown.front:
        console.print(summary.price_line(shown))
        console.print(_front_table(shown))
    for text in (*summary.infeasible_lines(shown), *summary.unstable_lines(shown)):
        console.print(text)
    for record in shown.finished:
        if record.reason:
            console.print(f"{record.status}: {record.notation} ({record.trial_id}): {record.reason}")
            traceback = folder / "trials" / record.trial_id / TRACEBACK_FILE
            if traceback.exists() and str(traceback) not in record.reason:
                console.print(f"  traceback: {traceback}")


def _front_table(run: Run) -> Table:
    marks = [summary.mark(member.val_loss, run.ngrams) for member in run.front]
    title = ["Pareto front", f"~ {summary.IN_NOISE}", "* its price range crosses the budget"]
    title[1:1] = filter(None, [summary.spread_words(run.front)])
    table = Table(title="; ".join(title))
    headings = ["arch_id", "architecture", "folded", "perplexity", "latency", "sent", "tokens"]
    second = run.meta.second
    on_second = [] if second is None else [f"on {second.data}"]
    keys = ["keys"] * any(member.key_bytes is not None for member in run.front)
    others = run.config.protocols[1:]
    for heading in (
        headings + keys + [f"under {name}" for name in others] + on_second + ["against n-grams"] * any(marks)
    ):
        table.add_column(heading, overflow="fold")
    for member, inside, marked in zip(run.front, in_noise(run.front), marks, strict=True):
        table.add_row(
            member.arch_id,
            member.notation,
            member.deployed or "unchanged",
            summary.perplexity_text(member) + (" ~" if inside else ""),
            format_seconds(member.latency_s) + (" *" if crosses(member, run.budget) else ""),
            format_bytes(member.sent_bytes),
            f"{member.first.tokens:,}",
            *([format_bytes(member.key_bytes or 0)] if keys else []),
            *(format_price(member.also[name]) for name in others),
            *([summary.second_text(run, member)] if on_second else []),
            *([marked] if any(marks) else []),
        )
    return table


main = partial(cli.run, status, "python -m nas.status")  # (args=None): runs the command line and exits with its code


if __name__ == "__main__":
    main()
