"""The end of a study: its front drawn, its page written, and what came out, in lines."""

import shutil

from costmodel.errors import StoppedError
from nas.report.html.page import write_report
from nas.report.plot_files import plot_front, remove_plots
from nas.report.summary import closing_lines
from nas.run.run import Run
from nas.study.trials import Trials
from nas.training import checkpoint


def closing(trials: Trials, run: Run) -> list[str]:
    """Draws the front, writes the page, and returns what came out, in lines. run: as the trials left it.

    Raises StoppedError if no trial was completed.
    """
    unfinished = trials.running or not trials.finished
    resume = f"time budget used up; go on with --resume {run.folder}" if unfinished else ""
    if not run.completed:
        report_line(run)
        reason = resume or f"see the reasons in {run.folder / 'trials.csv'}"
        raise StoppedError(f"no trial was trained to completion: {reason}.")
    remove_plots(run.folder)
    if not unfinished:
        _drop_checkpoints_of_looks(run)
    lines = [*closing_lines(run, plot_front(run)), resume, report_line(run)]
    return [line for line in lines if line]


def _drop_checkpoints_of_looks(run: Run) -> None:
    """Nobody goes on from them, unless the run is extended: what goes on then is trained again from its beginning."""
    for record in run.finished:
        if record.status == "paused":
            shutil.rmtree(run.folder / "trials" / record.trial_id / checkpoint.FOLDER, ignore_errors=True)


def report_line(run: Run) -> str:
    """Writes the page of a run and says where it is, or why there is none: what was trained is worth more than it."""
    try:
        return f"report: {write_report(run)}"
    except Exception as error:
        return f"note: no report was written ({error}); try python -m nas.report {run.folder}"
