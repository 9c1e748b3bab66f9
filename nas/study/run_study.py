"""One study from prepared data to a finished run folder: what `nas.search` does once it knows that something fits.

Each of its three parts needs a library that takes a second to import: torch, Ray and matplotlib. So each is imported
when a study comes to it, by the functions here.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console

from costmodel.config.bugs import bugs_reported
from costmodel.errors import StoppedError
from nas.report.progress import shown
from nas.run.config import StudyConfig
from nas.run.folder import read_ledger
from nas.run.ledger import Record
from nas.run.run import Run
from nas.run.tables import write_tables
from nas.storage import locked
from nas.study.trials import RunHaltedError
from search_spaces.budget.feasible import FeasibleSpace


class Listener(Protocol):
    """Who is told how a run goes on."""

    def started(self, folder: Path) -> None:
        """Its folder is a run, and no trial has begun in this process."""

    def trial_ended(self, record: Record) -> None:
        """The record is in the ledger."""


def run_study(
    config: StudyConfig,
    feasible: FeasibleSpace,
    console: Console,
    *,
    folder: Path | None,
    output_dir: Path | None,
    listener: Listener,
) -> Path:
    """Trains candidates until the schedule is finished, then writes tables, front and plots and logs what came out.

    folder: the run to resume, or None for a new one in `output_dir`. Returns the run's folder.
    Raises UserError for bad input, StoppedError or OSError if the run cannot go on (it can be resumed).
    """
    from nas.study.start import start_study, start_trials  # torch

    since_s = time.monotonic()
    log = partial(console.print, soft_wrap=True, highlight=False)
    started = start_study(config, feasible, log, folder=folder, output_dir=output_dir)
    folder, config = started.folder, started.config
    saved = f"what was trained is saved; continue with --resume {folder}"
    with locked(folder), bugs_reported(folder, saved), _resumable(folder, console):
        trials = start_trials(started, console, listener.trial_ended)
        run = Run(folder=folder, config=config, meta=started.meta, records=tuple(trials.records))
        listener.started(folder)
        num_baselines = sum(proposal.role == "baseline" for proposal in trials.schedule.proposals)
        log(
            f"run {folder}: {config.num_trials} candidates and {num_baselines} baselines, "
            f"then {config.finalist_seeds} more seeds for each member of the front"
        )
        try:
            from nas.study.ray_tune import run_trials  # Ray

            with shown(console, lambda: replace(run, records=tuple(trials.records))) as refresh:
                budget_s = config.time_budget_s
                left_s = None if budget_s is None else budget_s - (time.monotonic() - since_s)
                run_trials(trials, started.resources, time_budget_s=left_s, on_change=refresh, log=log)
        finally:
            # of what is on disk: an interrupt may come between a write and its note
            write_tables(replace(run, records=read_ledger(folder)))
        from nas.study.closing import closing  # matplotlib

        for line in closing(trials, replace(run, records=tuple(trials.records))):
            log(line)
    return folder


@contextmanager
def _resumable(folder: Path, console: Console) -> Iterator[None]:
    """Says how a run that ends in here goes on. Raises StoppedError where it cannot as things are."""
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
