"""Trials one after the other in this process: for benchmarks, where every trial must have the same tokens."""

from collections.abc import Callable
from dataclasses import replace

from costmodel.cli import StoppedError
from nas.trials import Trials
from nas.worker import run_trial


def run_serially(trials: Trials, *, early_stopping: bool, on_change: Callable[[], None] = lambda: None) -> None:
    """Runs every trial of the schedule. Raises StoppedError if the run cannot go on (it can be resumed)."""
    while (spec := trials.next_spec()) is not None and not trials.halted:
        trials.started(spec)
        for event in run_trial(spec if early_stopping else replace(spec, rivals=())):
            trials.happened(spec, event)
        on_change()
    if trials.halted:
        raise StoppedError(trials.halted)
