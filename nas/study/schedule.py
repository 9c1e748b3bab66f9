"""The schedule of trials: candidates in generations, then more seeds for the front, behind ask and tell.

Reproducible by construction: proposals come in generations of a fixed size, and generation g depends only on the
seed, on g and on the results of generations up to g - 2. The lag of one generation keeps every worker busy while
a generation finishes, and arrival order never matters. Rounds of replicates (`nas.study.finalists`) are two
generations apart, so that each depends on all there was before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nas.run.ledger import Role
from nas.searchers.strategy import Strategy, Trained
from nas.study.early_stop import expected_ends
from nas.study.finalists import Key, Result, next_round
from search_spaces.notation import Member

GENERATION_SIZE = 4  # two workers finish a generation in two rounds; larger ones learn later, smaller ones idle
LAG = 2  # generation g sees the results of generations up to g - LAG


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A candidate to train. `index` numbers candidates and baselines in order; baselines are for comparison only.

    replicate: how many seeds after the run's own; a replicate has the index of its candidate.
    """

    index: int
    generation: int
    role: Role
    member: Member
    replicate: int = 0

    @property
    def key(self) -> Key:
        return self.index, self.replicate


class TrialSchedule:
    """Ask for the next proposal, tell how it ended; knows the generations and the lag.

    finalist_seeds: how many more seeds the front is trained with, once all candidates have ended.
    known: what a ledger says was proposed, by index. It stands, also where this version would propose otherwise: a
        generation that is there as a whole is not proposed again. Those of a negative generation are results of
        another run, which count for all but `num_trials`.
    baselines: of a run that has proposed nothing yet.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        seed: int,
        num_trials: int,
        baselines: Sequence[Member] = (),
        finalist_seeds: int = 0,
        known: Sequence[Proposal] = (),
        generation_size: int = GENERATION_SIZE,
    ) -> None:
        self.strategy = strategy
        self.seed = seed
        self.num_trials = num_trials
        self.finalist_seeds = finalist_seeds
        self.generation_size = generation_size
        self.proposals: list[Proposal] = []
        self.results: dict[Key, Result] = {}
        self.num_candidates = 0  # of this run, proposed so far
        self._untold: dict[Key, int] = {}  # generation of what has not ended yet
        self._asked = 0
        self._generation = 0
        self._exhausted = False
        self._replicated = finalist_seeds == 0
        self._rivals: tuple[int, tuple[Result, ...]] = (-1, ())
        self._known: dict[int, list[Member]] = {}
        for proposal in known:
            if proposal.generation < 0 or proposal.role == "baseline":
                self._add(proposal)
            else:
                self._known.setdefault(proposal.generation, []).append(proposal.member)
        if all(proposal.generation < 0 for proposal in known):
            self._add_all(0, "baseline", [member for member in baselines if member not in self._members()])

    def ask(self) -> Proposal | None:
        """The next proposal, or None: nothing until more results are told, or nothing at all (`finished`)."""
        if self._asked == len(self.proposals) and not self._extend():
            return None
        proposal = self.proposals[self._asked]
        self._asked += 1
        return proposal

    def tell(self, result: Result) -> None:
        self.results[result.key] = result
        self._untold.pop(result.key, None)

    @property
    def finished(self) -> bool:
        """Whether every trial there will ever be has been asked for."""
        return self._asked == len(self.proposals) and self._all_proposed and self._replicated

    def rivals(self, proposal: Proposal) -> tuple[Result, ...]:
        """The results an early stop of this trial may depend on: candidates of generations it may see."""
        generation, rivals = self._rivals
        if generation != proposal.generation:
            rivals = tuple(
                self.results[earlier.key]
                for earlier in self.proposals
                if earlier.role == "candidate" and earlier.generation <= proposal.generation - LAG
            )
            self._rivals = proposal.generation, rivals
        return rivals

    @property
    def _all_proposed(self) -> bool:
        """Whether there will be no more candidates."""
        return self._exhausted or self.num_candidates >= self.num_trials

    def _extend(self) -> bool:
        """Proposes the next generation if there is to be one and it may be known; says whether it did."""
        if not self._all_proposed:
            return self._visible(self._generation) and self._extend_candidates()
        generation = max((proposal.generation for proposal in self.proposals), default=0) + LAG
        return not self._replicated and self._visible(generation) and self._extend_replicates(generation)

    def _extend_candidates(self) -> bool:
        begun, left = self._known.get(self._generation, []), self.num_trials - self.num_candidates
        members = begun
        if len(begun) < min(self.generation_size, left):
            members = self._completed_generation(begun)
            self._exhausted = len(members) < self.generation_size
        self._add_all(self._generation, "candidate", members[:left])
        self._generation += 1
        return bool(members) or self._extend()

    def _completed_generation(self, begun: list[Member]) -> list[Member]:
        """A generation as proposed now, but for what the ledger has of it."""
        rng = np.random.default_rng([self.seed, self._generation])
        known = self.trained(self._generation - LAG)
        members = self.strategy.propose(self.generation_size, rng, self._members(), known)
        return [*begun, *(member for member in members if member not in begun)][: self.generation_size]

    def _extend_replicates(self, generation: int) -> bool:
        candidates = {proposal.index: proposal.member for proposal in self.proposals if proposal.role == "candidate"}
        asked = [proposal.key for proposal in self.proposals if proposal.role == "replicate"]
        results = [self.results[proposal.key] for proposal in self.proposals if proposal.role != "baseline"]
        for index, replicate in (keys := next_round(results, asked, self.finalist_seeds)):
            self._add(
                Proposal(
                    index=index,
                    generation=generation,
                    role="replicate",
                    member=candidates[index],
                    replicate=replicate,
                )
            )
        self._replicated = not keys
        return bool(keys)

    def _visible(self, generation: int) -> bool:
        """Whether every result that a generation depends on has been told."""
        return min(self._untold.values(), default=generation) > generation - LAG

    def trained(self, generation: int | None = None) -> list[Trained]:
        """How candidates ended, of generations up to this one, in the order in which they were proposed.

        What was stopped at a rung counts as if it had ended as those that completed say it would have.
        """
        ended = [
            (proposal.member, result)
            for proposal in self.proposals
            if proposal.role == "candidate" and (generation is None or proposal.generation <= generation)
            if (result := self.results.get(proposal.key)) is not None
        ]
        losses = expected_ends([result for _, result in ended])
        return [
            Trained(member=member, latency_s=result.latency_s, log_perplexity=loss)
            for (member, result), loss in zip(ended, losses, strict=True)
            if result.status in ("completed", "diverged") or loss is not None
        ]

    def _members(self) -> frozenset[Member]:
        return frozenset(proposal.member for proposal in self.proposals)

    def _add_all(self, generation: int, role: Role, members: Sequence[Member]) -> None:
        for member in members:
            self._add(Proposal(index=len(self.proposals), generation=generation, role=role, member=member))

    def _add(self, proposal: Proposal) -> None:
        self.proposals.append(proposal)
        self._untold[proposal.key] = proposal.generation
        self.num_candidates += proposal.role == "candidate" and proposal.generation >= 0
