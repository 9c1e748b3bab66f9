"""Runs a study from its priced space to a finished run folder, for `nas.search`.

torch, Ray and matplotlib each take a second to import, so each is imported when a study needs it.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from costmodel.config.bugs import bugs_reported, default_cache_dir, require_writable_cache
from costmodel.errors import StoppedError
from nas.malloc import release_freed_memory
from nas.report.progress import logged_to, shown
from nas.report.summary import closing_lines
from nas.run import ledger
from nas.run.ledger import Record
from nas.run.run import Run
from nas.run.tables import write_tables
from nas.storage import locked
from nas.study.priced_study import PricedStudy
from nas.study.time_budget import TimeBudget
from nas.study.trials import RunHaltedError, Trials


def run_study(
    priced: PricedStudy,
    console: Console,
    *,
    output_dir: Path | None,
    began_s: float,
    on_start: Callable[[Path], None],
    on_end: Callable[[Record], None],
) -> Path:
    """Train until all trials have ended or the time is up; write tables, plots and report; return the run's folder.

    priced: the study. console: shows progress and results.
    output_dir: folder of a new run, by default one under runs/; without effect for a run to resume.
    began_s: when the time budget began, on the clock of `time.monotonic`.
    on_start: called with the run's folder after its files are written, before any trial begins. on_end: called with the
        record of each trial that ended, once it is in the ledger, except for failures that are tried again.
    Raises UserError for bad input, or if another process has the folder; InfeasibleError if no member within the budget
    stays within fixed-point range; StoppedError or OSError if the run cannot begin or continue now, or no trial
    completed; BugError for a bug. After `on_start` was called, the run can be resumed.
    """
    from nas.study.open_trials import start_trials  # torch
    from nas.study.resolve import resolve_study

    log = partial(console.print, soft_wrap=True, highlight=False)
    budget = TimeBudget(priced.config.time_budget_s, began_s, priced.config.time_limit_s)
    budget.mark("prices")
    with logged_to(console):
        study = resolve_study(priced, output_dir)
        budget.mark("data and parent")
        budget.prepare()
    folder, config = study.folder, study.config
    saved = f"what was trained is saved; continue with --resume {folder}"
    with locked(folder), bugs_reported(folder, saved), _resumable(folder, console):
        with logged_to(console):
            trials = start_trials(study, console, on_end, budget)
        run = replace(Run.read(folder), records=tuple(trials.records))
        on_start(folder)
        num_baselines = sum(proposal.role == "baseline" for proposal in trials.schedule.proposals)
        baselines = f" and {num_baselines} baseline{'s' * (num_baselines > 1)}" if num_baselines else ""
        seeds = f", then {config.finalist_seeds} more seeds for each member of the front"
        log(f"run {folder}: {config.num_trials} candidates{baselines}{seeds if config.finalist_seeds else ''}")
        try:
            require_home()  # before Ray is imported
            from nas.study.ray_tune import run_trials  # Ray

            release_freed_memory()  # the trials need what block scores took: 2 of 5 GB for SmolLM2-135M
            with (
                logged_to(console),
                shown(console, lambda: replace(run, records=tuple(trials.records)), lambda: budget.left_s) as refresh,
            ):
                run_trials(trials, study.resources, budget=budget, on_change=refresh)
        finally:
            # from the ledger on disk: an interrupt may have come between a write and its entry in memory
            write_tables(replace(run, records=ledger.read(folder / ledger.FILE_NAME)))
        for line in _closing(trials, replace(run, records=tuple(trials.records)), budget):
            log(line)
    return folder


def require_home() -> None:
    """Set HOME to the cache folder if the home directory, where Ray stores a token, is missing or read-only.

    Raises UserError if the cache folder cannot be written to either.
    """
    home = os.path.expanduser("~")
    if not (os.path.isdir(home) and os.access(home, os.W_OK)):
        require_writable_cache()
        folder = default_cache_dir()
        os.environ.update(HOME=str(folder), XDG_CACHE_HOME=str(folder.parent))


@contextmanager
def _resumable(folder: Path, console: Console) -> Iterator[None]:
    """Say how an interrupted run is resumed. Raises StoppedError if the machine's state prevents it now."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"everything is saved; continue with --resume {folder}", soft_wrap=True, highlight=False)
        raise
    except RunHaltedError as error:
        raise StoppedError(f"{error}; remove the cause, then continue with --resume {folder}") from error
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise StoppedError(f"{reason}; remove the cause, then continue with --resume {folder}") from error


def _closing(trials: Trials, run: Run, budget: TimeBudget) -> list[str]:
    """Draw the front, write the report, and return lines of results; StoppedError if no trial was completed."""
    from nas.report.draw import plot_run  # matplotlib
    from nas.training import checkpoint  # torch

    unfinished, config, is_spent = trials.running or not trials.finished, run.config, budget.is_over(trials)
    if not run.completed:
        report_line(run)
        bad = [record for record in run.finished if record.status in ("diverged", "failed")]
        reason = f"see the reasons in {run.folder / 'trials.csv'}"
        if bad:
            reason = "; ".join(
                [*(f"{record.notation} {record.status} ({record.reason})" for record in bad[:3]), reason]
            )
        elif is_spent:
            reason = f"time limit used up (before the first steps: {budget.spent()})"
        weak = run.meta.weak_parent and f"; {run.meta.weak_parent}"
        more = f"; continue with --resume {run.folder}" if unfinished else ""
        raise StoppedError(f"no trial was trained to completion: {reason}{weak}{more}.")
    resume = ""
    if unfinished:
        num_ended = sum(record.role == "candidate" and record.seed == config.seed for record in run.completed)
        resume = (
            f"{config.time_budget or config.time_limit} were enough for {num_ended} of {config.num_trials} candidates; "
            f"for more, continue with --resume {run.folder}"
        )
    if not unfinished:  # no longer needed: an extended run trains these candidates from the beginning
        for record in run.finished:
            if record.status == "paused":
                shutil.rmtree(run.folder / "trials" / record.trial_id / checkpoint.FOLDER, ignore_errors=True)
    lines = [*closing_lines(run, plot_run(run)), resume, report_line(run)]
    return [line for line in lines if line]


def report_line(run: Run) -> str:
    """Write the report of a run and return a line with its path; if that fails, return a line with the error."""
    from nas.report.html.page import write_report  # its template engine

    try:
        return f"report: {write_report(run)}"
    except Exception as error:
        return f"note: no report was written ({error}); try python -m nas.report {run.folder}"
