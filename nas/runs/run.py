"""`Run`: what a study has left on disk, as typed data, tables, figures and a page; and how to go on with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from costmodel.errors import UserError
from nas.results.front import Summary, front, summarise
from nas.results.ledger import Record, Table
from nas.results.members import TrainedMember, members
from nas.results.tables import front_table, trial_table
from nas.study.config import StudyConfig, flag
from nas.study.run_folder import Meta, find_run, read_config, read_ledger, read_meta

if TYPE_CHECKING:  # the one draws, the other calls back with runs
    from nas.runs.callbacks import Callback
    from nas.runs.repriced import RepricedRun

# A resumed run keeps what its results depend on; only these may differ from one process to the next.
RESUMABLE = (
    "budget_latency",
    "budget_comm",
    "num_trials",
    "finalist_seeds",
    "time_budget",
    "trial_timeout",
    "max_failures",
    "max_concurrent",
    "ray_address",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a study, in its folder; nothing here needs torch or Ray but `resume`.

    config: what was searched. meta: what it was made with. Records are read from disk when they are first asked for.
    """

    folder: Path
    config: StudyConfig = field(repr=False)
    meta: Meta = field(repr=False)

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """Every event of every trial, in order. Raises UserError, naming file and line, if the ledger is damaged."""
        return read_ledger(self.folder)

    @cached_property
    def members(self) -> tuple[TrainedMember, ...]:
        """Candidates and baselines with a completed trial, each with all its seeds, in order of proposal."""
        return members(self.records)

    @cached_property
    def front(self) -> tuple[TrainedMember, ...]:
        """The Pareto front within the budget, cheapest first: seconds per token against mean loss over seeds."""
        return front(self.records, self.config.budget)

    @property
    def summary(self) -> Summary:
        """Counts of trials by how they ended, the hypervolume (seconds x nats), the best member."""
        seeds = self.config.finalist_seeds
        return summarise(self.records, self.config.budget, self.meta.reference, finalist_seeds=seeds)

    def table(self, of: Literal["front", "trials"] = "front") -> Table:
        """The columns and rows of `pareto.csv` (a row a member) or `trials.csv` (a row a trial that ended)."""
        if of == "front":
            return front_table(self.records, self.config.budget, self.meta.ngrams)
        return trial_table(self.records, self.meta.ngrams)

    def to_pandas(self, of: Literal["front", "trials"] = "front") -> Any:
        """`table` as a pandas.DataFrame, num_rows x num_columns. Raises UserError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise UserError("a table of pandas needs pandas, but it is not installed; pip install pandas.") from None
        columns, rows = self.table(of)
        return pandas.DataFrame(list(rows), columns=list(columns))

    def plot(self, **prices: Any) -> tuple[Path, ...]:
        """Draws the figures of `python -m nas.plot` into the folder's `plots/` and returns their paths.

        prices: as `reprice` takes them; with any, the figures are of the run as it would be under those.

        Raises UserError if no trial is completed, or as `reprice` does.
        """
        from nas.runs.repriced import plot_as_run

        return self.reprice(**prices).plot() if prices else plot_as_run(self)

    def reprice(
        self,
        *,
        protocol: str | None = None,
        network: str | None = None,
        testbed: Path | None = None,
        seq_len: int | None = None,
        budget_latency: str | None = None,
        budget_comm: str | None = None,
    ) -> "RepricedRun":
        """The run's trials under other prices; nothing is trained again, and the ledger stays as it is.

        Args:
            protocol: published, semi2k, aby3 or cheetah, instead of the run's.
            network: a named network or a .yaml file; by default the run's, if the protocol is the run's.
            testbed: a .yaml file of compute seconds; by default likewise.
            seq_len: tokens of the prompt, instead of the run's.
            budget_latency: most time per token, with a unit, such as 5min; by default none.
            budget_comm: most bytes sent per token, with a unit, such as 8GB; by default none.

        Raises UserError if no trial is completed, or for prices that do not exist or do not go together.
        """
        from nas.runs.repriced import reprice

        return reprice(
            self,
            protocol=protocol,
            network=network,
            testbed=testbed,
            seq_len=seq_len,
            budget_latency=budget_latency,
            budget_comm=budget_comm,
        )

    def report(self, output: Path | None = None) -> Path:
        """Writes the run's page (report.html in its folder, unless another file is given) and returns its path.

        Raises UserError if a file of the run is damaged or the page cannot be written.
        """
        from nas.study.run_report import write_report

        return write_report(self.folder, output)

    def resumed(self, **changes: Any) -> StudyConfig:
        """The run's configuration with what may change. Raises UserError for a field that may not."""
        config = self.config
        for name, value in changes.items():
            if not hasattr(config, name):
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

    def resume(self, *, callbacks: Sequence["Callback"] = (), console: Console | None = None, **changes: Any) -> "Run":
        """Goes on with the run, as `nas.Study.run` does, and returns it as it is then.

        changes: of `RESUMABLE`: num_trials (more), budgets, limits and where it runs. Under another budget what was
        trained stays; the front is of what fits, and what is proposed from now on fits too.

        Raises UserError for another change, or if prices or data are no longer those of the run; else as
        `nas.Study.run` does.
        """
        from nas.runs.study import train

        return train(self.resumed(**changes), folder=self.folder, callbacks=callbacks, console=console)


def load_run(run: str | Path) -> Run:
    """A run from its folder, or the newest under `runs/` by the name `latest`.

    Raises UserError if there is none, or its configuration is damaged.
    """
    folder = find_run(str(run))
    return Run(folder=folder, config=read_config(folder), meta=read_meta(folder))
