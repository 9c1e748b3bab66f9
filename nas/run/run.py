"""`Run`: the folder of a study as one typed, immutable object, for all functions that show or use a run."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from costmodel.cost import Budget
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from nas.corpus.ngrams import NgramBaseline
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.folder import Meta, ParentResult, find_run, read_config, read_meta, run_pricers
from nas.run.ledger import Record, architecture_of, deployed_of
from nas.run.members import TrainedMember, front, members, picked
from nas.run.pareto import hypervolume
from search_spaces.architecture import Architecture
from search_spaces.lower import Workload

MOVES = ("started", "finished")  # after the first event a trial is running, after the second it is not


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Counts of candidates and baselines by result, and the Pareto front of the candidates.

    running: trials in training, replicates included. completed, diverged, failed: by the last result. paused:
        candidates with only a low-fidelity evaluation. evaluated: candidates whose low-fidelity evaluation has ended.
        replicates: trials of further seeds that have ended. seeds_left: further seeds to train if the front stays the
        same. hypervolume: in seconds x nats. best: member of lowest perplexity on the front; None if it is empty.
    """

    running: int
    completed: int
    paused: int
    evaluated: int
    diverged: int
    failed: int
    replicates: int
    seeds_left: int
    front: tuple[TrainedMember, ...]
    hypervolume: float
    best: TrainedMember | None

    @property
    def ended(self) -> int:
        """Number of candidates and baselines that completed, diverged or failed."""
        return self.completed + self.diverged + self.failed


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a study, in the state that its records describe.

    config: the study. meta: further facts, recorded at the start. records: every event of every trial, in order.
    """

    folder: Path
    config: StudyConfig = field(repr=False)
    meta: Meta = field(repr=False)
    records: tuple[Record, ...] = field(repr=False)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the run in a folder: run.yaml, meta.json and, if there is one yet, the ledger (`ledger.read`).

        Raises UserError, naming the file, if one of the three is damaged, or one of the first two is missing.
        """
        meta, config = read_meta(folder), read_config(folder)
        return cls(folder=folder, meta=meta, config=config, records=ledger.read(folder / ledger.FILE_NAME))

    @classmethod
    def find(cls, run: str) -> Self:
        """Read the run in a folder, or the newest under `runs/` for `latest`.

        Raises UserError as `read` does, and if there is no run or anything in its folder is a link, pipe or device.
        """
        return cls.read(find_run(run))

    @cached_property
    def finished(self) -> tuple[Record, ...]:
        """The last `finished` record of every trial: candidates and baselines by order of proposal, then replicates."""
        return ledger.finished(self.records)

    @cached_property
    def completed(self) -> tuple[Record, ...]:
        """The records of `finished` whose status is `completed`: trials with a whole final training."""
        return ledger.completed(self.records)

    @property
    def is_proxy(self) -> bool:
        """Whether completed trials were trained at another width than the one whose cost is predicted."""
        return any(record.width != self.base.d_model for record in self.completed)

    @cached_property
    def members(self) -> tuple[TrainedMember, ...]:
        """Candidates and baselines with a completed trial, each with all its seeds, in order of proposal."""
        return members(self.records)

    @cached_property
    def front(self) -> tuple[TrainedMember, ...]:
        """The Pareto front of seconds per token and mean loss, cheapest first.

        Only candidates within the budget count, and none of which a seed diverged or the folded model failed its check.
        """
        return front(self.records, self.budget)

    @cached_property
    def summary(self) -> Summary:
        """Counts of trials by result, the front, its hypervolume, and its best member."""
        last = {(record.index, record.seed): record.event for record in self.records if record.event in MOVES}
        firsts = Counter(record.status for record in self.finished if record.role != "replicate")
        num_replicates = len(self.finished) - firsts.total()
        tried = Counter(record.index for record in self.finished)
        lacking = sum(max(0, 1 + self.config.finalist_seeds - tried[member.first.index]) for member in self.front)
        return Summary(
            running=sum(event == "started" for event in last.values()),
            completed=firsts["completed"],
            paused=firsts["paused"],
            evaluated=len({record.index for record in self.records if record.is_proxy and record.event == "finished"}),
            diverged=firsts["diverged"],
            failed=firsts["failed"],
            replicates=num_replicates,
            seeds_left=max(0, min(lacking, self.config.most_replicates - num_replicates)),
            front=self.front,
            hypervolume=hypervolume([member.point for member in self.front], self.meta.reference),
            best=picked(self.front, "best") if self.front else None,
        )

    @property
    def num_planned(self) -> int:
        """Number of candidates and baselines that will end: by a final training, or earlier by failing or diverging."""
        others = {record.index for record in self.records if record.role == "baseline"}
        failed_early = sum(record.is_proxy and record.status != "paused" for record in self.finished)
        return self.config.num_trials + len(others) + failed_early

    @cached_property
    def pricer(self) -> Pricer:
        """The pricer of the run's first protocol, on the run's network and testbed."""
        return self.pricers[0]

    @cached_property
    def pricers(self) -> tuple[Pricer, ...]:
        """The pricers of all protocols of the run; the front uses the first."""
        return run_pricers(self.folder, self.config)

    @property
    def budget(self) -> Budget:
        return self.config.budget

    @property
    def workload(self) -> Workload:
        return self.config.workload

    @property
    def seq_len(self) -> int:
        """Number of tokens of the prompt whose cost is predicted."""
        return self.config.seq_len

    @property
    def base(self) -> Architecture:
        """The dimensions that all members share."""
        return self.meta.base

    @property
    def parent(self) -> ParentResult | None:
        """The result of the candidates' parent; None if they are trained from scratch."""
        return self.meta.parent

    @property
    def ngrams(self) -> NgramBaseline | None:
        """The n-gram baselines on the candidates' training text; None if not counted."""
        return self.meta.ngrams

    def priced_form(self, record: Record) -> Architecture:
        """Return the architecture whose cost the record of a trial has: folded or unfolded, as in `config.cost_of`."""
        return (deployed_of if self.config.cost_of == "folded" else architecture_of)(record, self.base)

    def pick(self, choice: str) -> Record:
        """Return the first completed trial of a member of the run. Raises UserError if there is no such member.

        choice: `knee` or `best` (of lowest perplexity) of the front, or the arch_id of a candidate or baseline. If
        several have this arch_id, the cheapest is meant.
        """
        if choice in ("knee", "best"):
            if self.front:
                return picked(self.front, choice).first
            raise UserError("the run has no completed candidate within its budget yet, so there is nothing to pick.")
        chosen = [member for member in self.members if member.arch_id == choice]
        if not chosen:
            known = ", ".join(member.arch_id for member in self.front) or "none"
            raise UserError(
                f"--pick must be knee, best or the arch_id of a completed trial (on the front: {known}), "
                f"but got {choice!r}."
            )
        return min(chosen, key=lambda member: member.point).first
