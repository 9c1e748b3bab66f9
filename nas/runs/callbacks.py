"""What a run calls while it goes on: loggers, trackers, dashboards of the user's own."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nas.results.ledger import Record
from nas.runs.run import Run, load_run


class Callback:
    """Subclass it and override what you need. Called in the process that runs the study, one event at a time."""

    def run_started(self, run: Run) -> None:
        """Before the first trial. A resumed run has records already."""

    def trial_ended(self, record: Record) -> None:
        """After a trial is in the ledger: completed, stopped, diverged or failed."""

    def run_ended(self, run: Run) -> None:
        """At the end, also of a run that was interrupted or stopped; `run` has all that is on disk."""


class Calls:
    """Hands events on to callbacks.

    One that raises is told of in a warning and not called again: what is trained is worth more than what logs it.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._folder: Path | None = None

    def started(self, folder: Path) -> None:
        self._folder = folder
        if self._callbacks:
            run = load_run(folder)
            self._call("run_started", lambda callback: callback.run_started(run))

    def trial_ended(self, record: Record) -> None:
        self._call("trial_ended", lambda callback: callback.trial_ended(record))

    def ended(self) -> None:
        """Nothing if the run never started."""
        if self._callbacks and self._folder is not None:
            run = load_run(self._folder)
            self._call("run_ended", lambda callback: callback.run_ended(run))

    def _call(self, event: str, tell: Callable[[Callback], Any]) -> None:
        for callback in list(self._callbacks):
            try:
                tell(callback)
            except Exception as error:  # of the user's own code
                self._callbacks.remove(callback)
                warnings.warn(
                    f"callback {type(callback).__name__} raised {type(error).__name__} in {event} ({error}); "
                    "the run goes on without it.",
                    stacklevel=2,
                )
