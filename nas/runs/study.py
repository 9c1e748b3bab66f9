"""`Study`: a configuration that can be priced and run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich.console import Console

from nas.runs.callbacks import Callback, Calls
from nas.runs.priced_study import PricedStudy, price_study
from nas.runs.run import Run, load_run
from nas.study.config import StudyConfig
from search_spaces.budget.feasible import check_feasible


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Study(StudyConfig):
    """What to search, within which budget, on what: the fields of `StudyConfig`, which are the flags of `nas.search`.

    Raises UserError for a value that a field cannot have.
    """

    def priced(self) -> PricedStudy:
        """The whole space with its prices; nothing is trained or written. Raises UserError as `run` does."""
        return price_study(self)

    def run(
        self,
        *,
        callbacks: Sequence[Callback] = (),
        output_dir: str | Path | None = None,
        console: Console | None = None,
    ) -> Run:
        """Prices the space, trains candidates until the schedule or the time is used up, and returns the run.

        callbacks: are told of the run's start and end and of every trial that ended.
        output_dir: folder of the run, by default runs/<UTC time>. console: where progress goes; by default nowhere.

        Raises UserError for bad input (nothing is written), InfeasibleError if nothing fits the budget, StoppedError
        or OSError if the run cannot go on; what was trained is saved, and `load_run(folder).resume()` goes on.
        """
        folder = None if output_dir is None else Path(output_dir)
        return train(self, output_dir=folder, callbacks=callbacks, console=console)


def train(
    config: StudyConfig,
    *,
    folder: Path | None = None,
    output_dir: Path | None = None,
    callbacks: Sequence[Callback] = (),
    console: Console | None = None,
) -> Run:
    """As `Study.run`. folder: the run to go on with, or None for a new one in `output_dir`."""
    console = console or Console(quiet=True)
    priced = price_study(config, folder)
    for line in priced.lines:
        console.print(line, soft_wrap=True, highlight=False)
    check_feasible(priced.feasible)
    from nas.study.run_study import run_study  # torch, Ray and matplotlib are not needed to price a space

    calls = Calls(callbacks)
    try:
        return load_run(
            run_study(config, priced.feasible, console, folder=folder, output_dir=output_dir, listener=calls)
        )
    finally:
        calls.ended()
