"""`Run`: a study's folder as one typed, immutable object, which everything that shows or uses a run takes."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from costmodel.cost import Budget
from costmodel.estimate import Pricer
from nas.corpus.ngrams import NgramBaseline
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.folder import Meta, ParentResult, find_run, read_config, read_ledger, read_meta, run_pricer
from nas.run.front import Summary, front, num_planned, pick, summarise
from nas.run.ledger import Record, architecture_of, deployed_of
from nas.run.members import TrainedMember, members
from search_spaces.architecture import Architecture
from search_spaces.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a study. While it goes on, `replace(run, records=...)` is how it stands.

    config: what was searched. meta: what it was made with. records: every event of every trial, in order.
    """

    folder: Path
    config: StudyConfig = field(repr=False)
    meta: Meta = field(repr=False)
    records: tuple[Record, ...] = field(repr=False)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The run of a folder. Raises UserError, naming file and line, if one of its files is damaged."""
        meta = read_meta(folder)
        return cls(folder=folder, config=read_config(folder), meta=meta, records=read_ledger(folder))

    @classmethod
    def find(cls, run: str) -> Self:
        """The run of a folder, or the newest under `runs/` by the name `latest`. Raises UserError if it is none."""
        return cls.read(find_run(run))

    @cached_property
    def finished(self) -> tuple[Record, ...]:
        """The end of every trial: candidates and baselines as proposed, then replicates."""
        return ledger.finished(self.records)

    @cached_property
    def completed(self) -> tuple[Record, ...]:
        """Those of `finished` that were trained to full fidelity."""
        return ledger.completed(self.records)

    @cached_property
    def members(self) -> tuple[TrainedMember, ...]:
        """Candidates and baselines with a completed trial, each with all its seeds, in order of proposal."""
        return members(self.records)

    @cached_property
    def front(self) -> tuple[TrainedMember, ...]:
        """The Pareto front within the budget, cheapest first: seconds per token against mean loss over seeds."""
        return front(self.records, self.budget)

    @cached_property
    def summary(self) -> Summary:
        """Counts of trials by how they ended, the hypervolume (seconds x nats), the best member."""
        seeds = self.config.finalist_seeds
        return summarise(self.records, self.budget, self.meta.reference, finalist_seeds=seeds)

    @property
    def num_planned(self) -> int:
        """Candidates and baselines that are to be trained."""
        return num_planned(self.records, self.config.num_trials)

    @cached_property
    def pricer(self) -> Pricer:
        """What the run is priced under, on its own network and testbed."""
        return run_pricer(self.folder, self.config)

    @property
    def budget(self) -> Budget:
        return self.config.budget

    @property
    def workload(self) -> Workload:
        return self.config.workload

    @property
    def seq_len(self) -> int:
        """Tokens of the prompt, in training and in prices."""
        return self.config.seq_len

    @property
    def base(self) -> Architecture:
        """The dimensions that all members share."""
        return self.meta.base

    @property
    def parent(self) -> ParentResult | None:
        """What the parent of the candidates reaches; None without one."""
        return self.meta.parent

    @property
    def ngrams(self) -> NgramBaseline | None:
        """What n-gram models reach of the training tokens; None where that was not counted."""
        return self.meta.ngrams

    def priced_form(self, record: Record) -> Architecture:
        """What the price of a trial is of."""
        return (deployed_of if self.config.accounting == "deployed" else architecture_of)(record, self.base)

    def pick(self, choice: str) -> Record:
        """The trial that `knee` or `best` of the front or an arch_id names. Raises UserError if there is none."""
        return pick(self.records, self.budget, choice)
