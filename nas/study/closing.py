"""The end of a study: its front drawn, its page written, and what came out, in lines."""

from pathlib import Path
from typing import Any

from costmodel.errors import StoppedError
from nas.report.plot_files import plot_front, remove_plots
from nas.report.price_lines import price_line
from nas.report.summary import closing_lines
from nas.results import ledger
from nas.results.front import front
from nas.study.config import StudyConfig
from nas.study.run_folder import Meta
from nas.study.run_report import write_report
from nas.study.trials import Trials
from search_spaces.budget.feasible import FeasibleSpace


def closing(trials: Trials, config: StudyConfig, feasible: FeasibleSpace, meta: Meta, folder: Path) -> list[str]:
    """Draws the front, writes the page, and returns what came out, in lines.

    Raises StoppedError if no trial was completed.
    """
    records, num_layers = trials.records, feasible.space.base.num_layers
    unfinished = f"time budget used up; go on with --resume {folder}" if trials.running or not trials.finished else ""
    if not ledger.completed(records):
        report_line(folder)
        reason = unfinished or f"see the reasons in {folder / 'trials.csv'}"
        raise StoppedError(f"no trial was trained to completion: {reason}.")
    remove_plots(folder)
    common: dict[str, Any] = {
        "num_layers": num_layers,
        "seq_len": config.seq_len,
        "ngrams": meta.ngrams,
        "parent": meta.parent,
    }
    plots = plot_front(folder, records, config.budget, **common)
    lines = closing_lines(records, config.budget, folder=folder, plots=plots, **common)
    members = front(records, config.budget)
    lines.append(price_line(members, feasible.space.base, config.protocol, config.workload))
    lines.append(trials.schedule.strategy.remark(trials.schedule.trained()) or "")
    lines.append(unfinished)
    lines.append(report_line(folder))
    return [line for line in lines if line]


def report_line(folder: Path) -> str:
    """Writes the page of a run and says where it is, or why there is none: what was trained is worth more than it."""
    try:
        return f"report: {write_report(folder)}"
    except Exception as error:
        return f"note: no report was written ({error}); try python -m nas.report {folder}"
