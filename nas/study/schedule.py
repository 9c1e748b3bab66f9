"""The schedule of trials: candidates in generations, then more seeds for the front, behind ask and tell.

A candidate gets a low-fidelity evaluation, up to the first rung, or its final training. A promoted candidate is asked
for again, and continues from its checkpoint.

Proposals are reproducible: generation g depends only on the seed, on g and on the results of generations up to g - 2,
in any order of arrival. The lag keeps workers busy while a generation finishes. Rounds of replicates
(`nas.study.finalists`) are two generations apart, so that each depends on all earlier ones.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nas.run.pareto import Point
from nas.searchers.strategy import Key, Observation, RemainingBudget, Strategy, Suggestion
from nas.study.finalists import next_round
from nas.study.proxies import losses_after_proxies
from search_spaces.notation import Member

GENERATION_SIZE = 2  # two workers finish a generation in one round; larger ones learn later
LAG = 2  # generation g sees the results of generations up to g - LAG


class Trainings(NamedTuple):
    """Numbers of candidates: final trainings, and low-fidelity evaluations."""

    ends: int
    shorts: int


class TrialSchedule:
    """Asks the searcher for trainings, in generations, and receives their results.

    Args:
        num_trials: candidates that get the final training.
        num_proxy_evals: candidates that get a low-fidelity evaluation.
        baselines: members to train for comparison, in a run that has proposed nothing yet.
        finalist_seeds: most further seeds of a member of the front, once all candidates have ended.
        most_replicates: most further seeds in all.
        reference: point of the hypervolume.
        parent_loss: nats, of what candidates start from.
        known: proposals in the ledger. They are kept even where this version would propose others.
    """

    def __init__(
        self,
        *,
        strategy: Strategy,
        seed: int,
        num_trials: int,
        num_proxy_evals: int = 0,
        baselines: Sequence[Member] = (),
        finalist_seeds: int = 0,
        most_replicates: int = 0,
        reference: Point,
        parent_loss: float | None = None,
        known: Sequence[Suggestion] = (),
        generation_size: int = GENERATION_SIZE,
    ) -> None:
        self.strategy, self.seed = strategy, seed
        self.most = Trainings(num_trials, num_proxy_evals if strategy.takes_proxies else 0)
        self.remaining = _remaining(Trainings(0, 0), self.most)
        self.finalist_seeds, self.most_replicates = finalist_seeds, most_replicates
        self.reference, self.parent_loss = reference, parent_loss
        self.generation_size = generation_size
        self.proposals: list[Suggestion] = []
        self.proxy_evals: dict[int, Observation] = {}
        self.results: dict[Key, Observation] = {}  # of final trainings, and of any that diverged or failed
        self._untold: dict[Key, int] = {}  # generations of trainings that have not ended
        self._skipped: list[Suggestion] = []
        self._asked, self._generation, self._exhausted = 0, 0, False
        self._replicated = 0 in (finalist_seeds, most_replicates)
        self._known: dict[int, list[Suggestion]] = {}
        self._indexes: dict[Member, int] = {}
        for proposal in known:
            if proposal.role == "baseline":
                self._add(proposal)
            else:
                self._known.setdefault(proposal.generation, []).append(proposal)
        if not known:
            for member in baselines:
                if member not in self._indexes:
                    self._add(Suggestion(member, generation=0, role="baseline", index=len(self._indexes)))

    def ask(self) -> Suggestion | None:
        """Return the next suggestion, or None if more results are needed first or nothing is left (`finished`)."""
        if self._asked == len(self.proposals) and not self._extend():
            return None
        proposal = self.proposals[self._asked]
        self._asked += 1
        return proposal

    def skip(self, proposal: Suggestion) -> None:
        """Take back the last suggestion, because it is not trained in this session."""
        self._untold.pop(proposal.key, None)
        self._skipped.append(proposal)

    def plan(self, more: Trainings) -> None:
        """Ask for only `more` further trainings of candidates, instead of all that are left."""
        self.remaining = _remaining(self.asked, more)

    @property
    def asked(self) -> Trainings:
        """The trainings of candidates that were asked for."""
        kinds = Counter(proposal.is_proxy for proposal in self.proposals if proposal.role == "candidate")
        kinds.subtract(proposal.is_proxy for proposal in self._skipped if proposal.role == "candidate")
        return Trainings(ends=kinds[False], shorts=kinds[True])

    @property
    def waiting(self) -> list[Suggestion]:
        """The proposals that were not asked for yet."""
        return self.proposals[self._asked :]

    @property
    def num_evaluated(self) -> int:
        """Number of candidates whose low-fidelity evaluation was asked for, but not their final training."""
        ends = {proposal.index for proposal in self.proposals if not proposal.is_proxy}
        ended = {index for index, _ in self.results}  # evaluations that diverged or failed
        return len({proposal.index for proposal in self.proposals} - ends - ended)

    def tell(self, result: Observation) -> None:
        if result.status == "paused":
            self.proxy_evals[result.index] = result
        else:
            self.results[result.key] = result
        self._untold.pop(result.key, None)

    @property
    def finished(self) -> bool:
        """Whether every trial has been asked for, and no more will come."""
        return self._asked == len(self.proposals) and self._all_proposed and self._replicated

    @property
    def _all_proposed(self) -> bool:
        return self._exhausted or self.asked.ends >= self.most.ends

    @property
    def is_held(self) -> bool:
        """Whether no more trainings are planned in this session, although some are left."""
        is_known = self._generation in self._known
        return self.remaining.final_trainings <= 0 and not (self._all_proposed or is_known or self.waiting)

    def _extend(self) -> bool:
        """Propose the next generation if the results it depends on are known; return whether it was proposed."""
        if not self._all_proposed:
            return not self.is_held and self._visible(self._generation) and self._extend_candidates()
        generation = max((proposal.generation for proposal in self.proposals), default=0) + LAG
        return not self._replicated and self._visible(generation) and self._extend_replicates(generation)

    def _extend_candidates(self) -> bool:
        suggestions, size = self._known.get(self._generation, []), self.generation_size
        if len(suggestions) < size:  # the ledger has only the beginning of the generation, or nothing
            rng = np.random.default_rng([self.seed, self._generation])
            trained, members = self.trained(self._generation - LAG), {begun.member for begun in suggestions}
            asked = self.strategy.suggestions(size, rng, self._indexes.keys(), trained, self.remaining)
            suggestions = [*suggestions, *(new for new in asked if new.member not in members)][:size]
        for suggestion in suggestions:
            index = self._indexes.get(suggestion.member, len(self._indexes))
            self._add(replace(suggestion, index=index, generation=self._generation))
        self._exhausted = len(suggestions) < size and self.remaining.final_trainings > 0
        self._generation += 1
        return bool(suggestions) or self._extend()

    def _extend_replicates(self, generation: int) -> bool:
        candidates = {proposal.index: proposal for proposal in self.proposals if proposal.role == "candidate"}
        asked = [proposal.key for proposal in self.proposals if proposal.role == "replicate"]
        results = [result for key, result in sorted(self.results.items()) if key[0] in candidates]
        keys = next_round(
            results,
            asked,
            seeds=self.finalist_seeds,
            most=self.most_replicates,
            size=self.generation_size,
            reference=self.reference,
        )
        for index, replicate in keys:
            again = replace(candidates[index], generation=generation, role="replicate", replicate=replicate)
            self._add(replace(again, is_proxy=False, expected=None))
        self._replicated = not keys
        return bool(keys)

    def _visible(self, generation: int) -> bool:
        return min(self._untold.values(), default=generation) > generation - LAG

    def trained(self, generation: int | None = None) -> list[Observation]:
        """Return results and predictions of candidates of generations up to this one, in the order of proposal."""
        asked: dict[int, list[Suggestion]] = {}
        for proposal in self.proposals:
            if proposal.role == "candidate":
                asked.setdefault(proposal.index, []).append(proposal)
        states: list[Observation] = []
        for index, proposals in asked.items():
            seen = [stage for stage in proposals if generation is None or stage.generation <= generation]
            ended = self.results.get((index, 0)) if len(seen) == len(proposals) else None
            state = ended or (self.proxy_evals.get(index) if any(stage.is_proxy for stage in seen) else None)
            if state is not None:
                states.append(replace(state, promoted=ended is None and len(proposals) > 1))
        ends = losses_after_proxies(states, self.parent_loss)
        return [
            replace(state, log_perplexity=end.mean, deviation=end.deviation) if end else state
            for state, end in zip(states, ends, strict=True)
            if state.status != "failed"
        ]

    def _add(self, proposal: Suggestion) -> None:
        self.proposals.append(proposal)
        self._untold[proposal.key] = proposal.generation
        self._indexes.setdefault(proposal.member, proposal.index)
        if proposal.role == "candidate":
            self.remaining = self.remaining.after(is_proxy=proposal.is_proxy)


def _remaining(asked: Trainings, more: Trainings) -> RemainingBudget:
    per_end = (asked.shorts + more.shorts) / max(1, asked.ends + more.ends - 1)
    return RemainingBudget(proxy_evals=more.shorts, final_trainings=more.ends, per_end=per_end)
