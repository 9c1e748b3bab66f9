"""New members within a budget, drawn evenly over prices: what a search falls back on, and begins with.

Nearly all members lie at the budget: of uniform draws from `gpt2-small` at 5 minutes a token, 19 of 20 cost within 10 %
of it. So a draw is uniform within one of NUM_SLICES equal slices of the price, the one with the fewest members so far.
"""

from collections.abc import Collection, Hashable, Sequence
from itertools import islice

import numpy as np

from search_spaces.budget.feasible import FeasibleSpace, price_slices
from search_spaces.deployed import deployed
from search_spaces.notation import Member

NUM_SLICES = 8  # with the default 13 candidates, one or two in each
# Of the range of prices as deployed, at the cheap end, where next to nothing is left of the model: trained from the
# builtin parent, deployed forms of 2.1 to 3.2 minutes have perplexities of 101 to 17, above the trigram's 16.
IDLE_SHARE = 0.4
TRIES = 32  # draws from a slice of which none is new before the next slice is tried
WALKED = 10_000  # members looked through, in their order, where draws find nothing new: small spaces are used up


class Draws:
    """The members within a budget, sliced by price.

    slices: those that hold a member, cheapest first; of prices as deployed without the cheap end, IDLE_SHARE of the
        range, unless the space lists its members.
    """

    def __init__(self, feasible: FeasibleSpace) -> None:
        self.feasible = feasible
        is_listed = feasible.space.definition.members is not None  # by someone who wants them all
        idle = IDLE_SHARE if feasible.priced.accounting == "deployed" and not is_listed else 0.0
        self.slices = price_slices(feasible, NUM_SLICES, idle) or price_slices(feasible, NUM_SLICES)

    def form(self, member: Member) -> Hashable:
        """What makes a member one answer: its deployed form where that is priced, however it is trained, or itself."""
        return deployed(member.architecture) if self.feasible.priced.accounting == "deployed" else member

    def new_of(self, members: Collection[Member], seen: Collection[Member]) -> list[Member]:
        """The members within budget whose form is that of none seen and of none before it."""
        forms, new = {self.form(member) for member in seen}, list[Member]()
        for member in members:
            if self.feasible.fits(member) and (form := self.form(member)) not in forms:
                forms.add(form)
                new.append(member)
        return new

    def is_drawn(self, member: Member) -> bool:
        """Whether a member is in one of the slices."""
        return any(part.fits(member) for part in self.slices)

    def emptiest(self, members: Collection[Member], rng: np.random.Generator) -> list[int]:
        """The numbers of the slices, those with the fewest of the members first, equal ones in random order."""
        counts = [sum(part.fits(member) for member in members) for part in self.slices]
        return sorted(map(int, rng.permutation(len(counts))), key=counts.__getitem__)

    def filled(
        self, chosen: Sequence[Member], size: int, rng: np.random.Generator, seen: Collection[Member]
    ) -> list[Member]:
        """`chosen` with new members, up to `size`; fewer only if none was found."""
        members = list(chosen)
        while len(members) < size and (member := self._drawn(rng, [*seen, *members])) is not None:
            members.append(member)
        return members

    def _drawn(self, rng: np.random.Generator, seen: Collection[Member]) -> Member | None:
        forms = {self.form(member) for member in seen}
        for number in self.emptiest(seen, rng):
            for _ in range(TRIES):
                if self.form(member := self.slices[number].sample(rng)) not in forms:
                    return member
        walk = islice(self.feasible.members(), WALKED)
        return next((member for member in walk if self.form(member) not in forms), None)
