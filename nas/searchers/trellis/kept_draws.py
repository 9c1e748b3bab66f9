"""Draws that remember what they were told of a member, since a long search asks of every member again and again."""

from collections.abc import Collection, Hashable, Sequence
from itertools import islice
from typing import final

import numpy as np

from costmodel.errors import UserError
from nas.searchers.draws import TRIES, WALKED, Draws
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member
from search_spaces.space import path_of


@final
class KeptDraws(Draws):
    """The same draws as `Draws`, from the same generator."""

    def __init__(self, feasible: FeasibleSpace) -> None:
        super().__init__(feasible)
        self._forms: dict[Member, Hashable] = {}
        self._slices: dict[Member, int | None] = {}

    def form(self, member: Member) -> Hashable:
        if (known := self._forms.get(member)) is None:
            known = self._forms[member] = super().form(member)
        return known

    def is_drawn(self, member: Member) -> bool:
        return self._slice_of(member) is not None

    def filled(
        self, chosen: Sequence[Member], size: int, rng: np.random.Generator, seen: Collection[Member]
    ) -> list[Member]:
        members = list(chosen)
        if len(members) >= size:
            return members
        forms = {self.form(member) for member in (*seen, *members)}
        counts = [0] * len(self.slices)
        for member in (*seen, *members):
            self._count(counts, member)
        while len(members) < size and (new := self._new(rng, counts, forms)) is not None:
            members.append(new)
            forms.add(self.form(new))
            self._count(counts, new)
        return members

    def _new(self, rng: np.random.Generator, counts: Sequence[int], forms: Collection[Hashable]) -> Member | None:
        order = sorted(map(int, rng.permutation(len(counts))), key=counts.__getitem__)
        for number in order:
            for _ in range(TRIES):
                if self.form(member := self.slices[number].sample(rng)) not in forms:
                    return member
        walk = islice(self.feasible.members(), WALKED)
        return next((member for member in walk if self.form(member) not in forms), None)

    def _count(self, counts: list[int], member: Member) -> None:
        if (number := self._slice_of(member)) is not None:
            counts[number] += 1

    def _slice_of(self, member: Member) -> int | None:
        """The slice that holds a member; no two do."""
        if member not in self._slices:
            self._slices[member] = self._found(member)
        return self._slices[member]

    def _found(self, member: Member) -> int | None:
        """By the costs of its path, which `FeasibleSpace.fits` walks once a slice."""
        try:
            path = path_of(self.feasible.space, member.architecture.layers)
        except UserError:
            return None
        costs = [self.feasible.costs[vertex] for vertex in path if vertex in self.feasible.costs]
        latency, sent = sum(cost[0] for cost in costs), sum(cost[1] for cost in costs)
        for number, part in enumerate(self.slices):
            if part.paths.above < latency <= part.paths.limit[0] and sent <= part.paths.limit[1]:
                return number
        return None
