"""What a page is of: a run's records, what they are priced under, and what the run says of itself."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from costmodel.cost import Budget
from costmodel.estimate import Pricer
from costmodel.protocols.primitives import Holder
from nas.corpus.ngrams import NgramBaseline
from nas.results.front import front
from nas.results.ledger import Record, architecture_of, deployed_of
from nas.results.members import TrainedMember, members
from nas.results.parent import ParentResult
from nas.results.pareto import Point
from search_spaces.architecture import Architecture
from search_spaces.budget.priced_space import Accounting
from search_spaces.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Run:
    """Plain facts; nothing of it is read from disk but the curves of its trials.

    folder: of the run. pricer, workload, accounting, weights: what its prices are of. cost_model_id: of the prices
    in its ledger, which may be older than the pricer. reference: of its hypervolume.
    num_trials: candidates that were asked for. num_members, num_feasible: of the space, and within the budget.
    flags: of the command that made it, but for those with their default.
    provenance: name and value of everything else that a repetition depends on.
    """

    folder: Path
    records: tuple[Record, ...]
    budget: Budget
    base: Architecture
    pricer: Pricer
    workload: Workload
    accounting: Accounting
    weights: Holder | None
    cost_model_id: str
    reference: Point
    num_trials: int
    num_members: int
    num_feasible: int
    space: str
    flags: tuple[str, ...]
    provenance: tuple[tuple[str, str], ...]
    parent: ParentResult | None
    ngrams: NgramBaseline | None

    @cached_property
    def front(self) -> tuple[TrainedMember, ...]:
        """Cheapest first; a member's number is its place, from 1."""
        return front(self.records, self.budget)

    @cached_property
    def members(self) -> tuple[TrainedMember, ...]:
        return members(self.records)

    @property
    def seq_len(self) -> int:
        return self.workload.prompt_len

    def priced_form(self, record: Record) -> Architecture:
        """What the price of a trial is of."""
        return (deployed_of if self.accounting == "deployed" else architecture_of)(record, self.base)
