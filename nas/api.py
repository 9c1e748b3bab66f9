"""Studies and runs as Python objects, and callbacks during a run, which `nas` exports."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, final

from rich.console import Console
from rich.table import Table as TextTable

from costmodel.errors import UserError
from nas.report.what_if import WhatIf, reprice, what_if_lines, what_if_table
from nas.run.config import StudyConfig, flag
from nas.run.folder import require_free
from nas.run.ledger import Record, Table
from nas.run.run import Run as PlainRun
from nas.run.tables import front_table, trial_table
from nas.study.priced_study import PricedStudy, price_study
from search_spaces.budget.feasible import check_feasible

# The fields that a resumed run may change. Of these fields, only the last three can change the numbers of a training.
RESUMABLE = (
    "budget_latency", "budget_comm", "budget_keys", "num_trials", "finalist_seeds", "time_budget", "time_limit",
    "trial_timeout",
    "max_failures", "max_concurrent", "gpus_per_trial", "threads_per_trial", "ray_address",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run(PlainRun):
    """A run of a study, with methods that tabulate, draw and report it, compute other costs, and continue it."""

    def table(self, of: Literal["front", "trials"] = "front") -> Table:
        """Return the table of `pareto.csv` (members of the front) or, for "trials", of `trials.csv` (ended trials)."""
        return front_table(self) if of == "front" else trial_table(self)

    def to_pandas(self, of: Literal["front", "trials"] = "front") -> Any:
        """Return `table` as a pandas.DataFrame. Raises UserError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise UserError("a table of pandas needs pandas, but it is not installed; pip install pandas.") from None
        columns, rows = self.table(of)
        return pandas.DataFrame(list(rows), columns=list(columns))

    def plot(self) -> tuple[Path, ...]:
        """Draw the Pareto front as PNG and SVG into `plots/` of the run's folder, and return the paths of the files.

        Raises UserError if no trial is completed, OSError if the files cannot be written.
        """
        from nas.report.draw import plot_run  # imported late, because matplotlib is slow

        return plot_run(self)

    def reprice(self, **prices: Any) -> "RepricedRun":
        """Return the run's trials at other costs. Nothing is trained again, and the ledger does not change.

        prices: protocol (only one), by default the run's first; seq_len, by default the run's; network and testbed, by
            default the run's if the run uses the protocol; budget_latency, budget_comm and budget_keys, by default
            none. They are written as in `StudyConfig`, but budgets cannot be shares of the parent's cost.

        Raises UserError if no trial is completed, an op has no cost, or an option has a bad value or excludes another;
        TypeError for an unknown option.
        """
        return RepricedRun(run=self, what_if=reprice(self, **prices))

    def report(self, output: Path | None = None) -> Path:
        """Write the run's report as HTML and return its path. output: file; by default report.html in the run's folder.

        Raises UserError if the run's costs cannot be computed or the page cannot be written.
        """
        from nas.report.html.page import write_report  # imported late, with its template engine

        return write_report(self, output)

    def resumed(self, **changes: Any) -> StudyConfig:
        """Return the run's configuration with changes. changes: new values by field.

        Raises UserError for an unknown field, a new value of a field outside `RESUMABLE`, a smaller `num_trials`, or an
        invalid value.
        """
        config = self.config
        known = {field.name for field in fields(config)}
        for name, value in changes.items():
            if name not in known:
                raise UserError(f"a resumed run may change {', '.join(map(flag, RESUMABLE))}, but got {flag(name)}.")
            if name not in RESUMABLE and value != getattr(config, name):
                raise UserError(
                    f"{flag(name)} of a resumed run must stay {getattr(config, name)!r}, but got {value!r}; "
                    f"start a new run, or change only {', '.join(map(flag, RESUMABLE))}."
                )
        if (asked := changes.get("num_trials", config.num_trials)) < config.num_trials:
            raise UserError(
                f"--num-trials of a resumed run can only be raised from {config.num_trials}, but got {asked}."
            )
        return replace(config, **changes)

    def resume(
        self,
        *,
        callbacks: "Sequence[Callback]" = (),
        console: Console | None = None,
        began_s: float | None = None,
        **changes: Any,
    ) -> Self:
        """Continue the run, as `nas.Study.run` does, and return it in its new state.

        changes: new values of fields in `RESUMABLE`: more trials, other budgets or limits, or other machines. Under
            another budget, finished trainings are kept; the front and new proposals respect the new budget.

        Raises UserError for changes that `resumed` refuses, if the cost model, a corpus, the tokenizer or the kept
        parent has changed since the run began, or if another process trains the run; other errors as `nas.Study.run`.
        """
        return self.read(_train(self.resumed(**changes), callbacks, console, began_s, run=self))


@dataclass(frozen=True, kw_only=True, slots=True)
class RepricedRun:
    """A run's members at other costs. what_if: the members with these costs, their front, protocol and budget."""

    run: Run
    what_if: WhatIf

    @property
    def lines(self) -> list[str]:
        """Lines of text: both settings (protocol, prompt, budget), and how front, knee and best member change."""
        return what_if_lines(self.what_if)

    @property
    def table(self) -> TextTable:
        """Table of the members of the old and the new front, with both costs and whether each stays on the front."""
        return what_if_table(self.what_if)


def load_run(run: str | Path) -> Run:
    """Read a run from its folder, or the newest under `runs/` for `latest`.

    Raises UserError if there is no run, if its run.yaml, meta.json or trials.jsonl is damaged, or if anything in its
    folder is a link, pipe or device.
    """
    return Run.find(str(run))


class Callback:
    """Base class of callbacks, called in the process that runs the study, one event at a time.

    Override the methods that you need. A callback that raises is named in a warning and not called again; the run goes
    on.
    """

    def run_started(self, run: Run) -> None:
        """Called before the first trial of this session. If the run is resumed, it has records already."""

    def trial_ended(self, record: Record) -> None:
        """Called after the end of a trial (completed, paused, diverged or failed) was written to the ledger.

        Not called for a failed trial that is tried again on another node.
        """

    def run_ended(self, run: Run) -> None:
        """Called at the end of a run that has started, even if interrupted or stopped; `run` is read from disk."""


class Calls:
    """Passes events to callbacks. If a callback raises, a warning names it, and it is not called again."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._folder: Path | None = None

    def started(self, folder: Path) -> None:
        self._folder = folder
        self._call("run_started", lambda callback: callback.run_started(load_run(folder)))

    def trial_ended(self, record: Record) -> None:
        self._call("trial_ended", lambda callback: callback.trial_ended(record))

    def ended(self) -> None:
        """Call `run_ended`, unless the run never started."""
        if (folder := self._folder) is not None:
            self._call("run_ended", lambda callback: callback.run_ended(load_run(folder)))

    def _call(self, event: str, call: Callable[[Callback], Any]) -> None:
        for callback in list(self._callbacks):
            try:
                call(callback)
            except Exception as error:  # from the user's code, or because the ledger is damaged
                self._callbacks.remove(callback)
                warnings.warn(
                    f"callback {type(callback).__name__} raised {type(error).__name__} in {event} ({error}); "
                    "the run goes on without it.",
                    stacklevel=2,
                )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Study(StudyConfig):
    """The space, budget and data of a search: the fields of `StudyConfig`, which are flags of `nas.search`.

    Raises UserError for an invalid value of a field. Whether a space, protocol, searcher, parent or corpus of a given
    name exists is checked later, by `priced` and `run`.
    """

    def priced(self) -> PricedStudy:
        """Return the whole space with its costs, even if no member is within the budget; nothing is trained or written.

        Weights of a parent are read only if it is builtin or a training of `nas.train`; of others, only the settings.
        Raises UserError if the space, a protocol, network or testbed, the parent or the searcher is unknown or cannot
        be read, a protocol cannot price the space, a budget is of keys that its protocol lacks, the space has too many
        costs to tabulate, or candidates cannot start from the parent or keep its public and client layers.
        """
        return price_study(self, reads_weights=False)

    def run(
        self,
        *,
        callbacks: Sequence[Callback] = (),
        output_dir: str | Path | None = None,
        console: Console | None = None,
        began_s: float | None = None,
    ) -> Run:
        """Compute costs, train candidates until all trials have ended or the time is up, and return the run.

        Args:
            callbacks: called at the run's start and end and after every trial.
            output_dir: folder of the run, by default runs/<UTC time>.
            console: shows progress; by default, nothing is shown.
            began_s: when the time budget began, on the clock of `time.monotonic`; by default now.

        Raises UserError for bad input, mostly before the run's folder is made (but later if Optuna or its sampler is
        missing); InfeasibleError if nothing fits the budget; StoppedError or OSError if the run cannot begin or go on,
        or no trial completes. From the first trial on, results are saved, and `load_run(folder).resume()` continues.
        """
        folder = None if output_dir is None else Path(output_dir).absolute()
        if folder is not None:
            require_free(folder)  # before anything is read
        return Run.read(_train(self, callbacks, console, began_s, output_dir=folder))


def _train(
    config: StudyConfig,
    callbacks: Sequence[Callback],
    console: Console | None,
    began_s: float | None,
    *,
    run: Run | None = None,
    output_dir: Path | None = None,
) -> Path:
    console, began_s = console or Console(quiet=True), time.monotonic() if began_s is None else began_s
    priced = price_study(config, run)
    for line in priced.lines:
        console.print(line, soft_wrap=True, highlight=False)
    check_feasible(priced.feasible)
    from nas.study.run_study import run_study  # imported late, so that --help and dry runs are fast

    calls = Calls(callbacks)
    try:
        return run_study(
            priced, console, output_dir=output_dir, began_s=began_s, on_start=calls.started, on_end=calls.trial_ended
        )
    finally:
        calls.ended()
