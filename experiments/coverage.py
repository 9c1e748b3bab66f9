"""Do intervals over validation documents hold what other documents say? Those of a run, split into halves at random.

The interval of one half is to hold the mean of the other. That mean is off by as much by itself: of a normal
distribution an interval of two standard errors holds it in 84 % of cases, and in 95 % once the errors of both halves
are counted, which is what the bar is on.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from rich.console import Console

from costmodel.errors import UserError
from experiments.bars import Figure, figure_table
from nas.run.intervals import ERRORS_APART, Documents, differences, document_error
from nas.run.run import Run

LEAST = 0.9  # share of cases


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it. run: a folder, or `latest`."""

    run: str
    num_splits: int
    seed: int


class Held(NamedTuple):
    """Shares of the cases in which an interval holds the other half's mean. alone: by the error of its own half.
    both: by those of both.
    """

    alone: float
    both: float


def run(name: str, settings: Settings, console: Console) -> None:
    """Prints shares for mean losses of members, and for differences of neighbours on the front.

    Raises UserError if there is no such run, or too little in it.
    """
    source = Run.find(settings.run)
    cases = cases_of(source)
    losses = cases["losses"]
    console.print(f"{source.folder}: {len(losses[0])} documents, {len(losses)} members", soft_wrap=True)
    console.print(figure_table("intervals that hold", figures(cases, settings)))


def cases_of(source: Run) -> dict[str, list[Documents]]:
    """What intervals are of: losses by document of every member, and by how much neighbours on the front differ.

    Raises UserError if there are none of either.
    """
    losses = [member.documents for member in source.members if member.documents]
    apart = [differences(costlier.documents, cheaper.documents) for cheaper, costlier in pairwise(source.front)]
    cases = {"losses": losses, "differences of neighbours": [documents for documents in apart if documents]}
    if not all(cases.values()):
        raise UserError(
            f"a run must have two members on its front with losses by document, but {source.folder} has not; "
            f"let it search on."
        )
    return cases


def figures(cases: dict[str, list[Documents]], settings: Settings) -> Iterator[Figure]:
    """Two a kind of case."""
    for words, documents in cases.items():
        held = held_of(documents, settings.num_splits, np.random.default_rng(settings.seed))
        yield Figure(f"{words}: by one half's error", held.alone, form="{:.0%}")
        yield Figure(f"{words}: by the errors of both", held.both, form="{:.0%}", least=LEAST)


def held_of(cases: Iterable[Documents], num_splits: int, rng: np.random.Generator) -> Held:
    """Shares over cases and splits. Halves are of documents, which count as they do in the whole."""
    held = []
    for documents in cases:
        for _ in range(num_splits):
            order = rng.permutation(len(documents))
            halves = [_whole([documents[place] for place in order[start::2]]) for start in range(2)]
            (mean, error), (other, other_error) = halves
            apart = abs(mean - other) / ERRORS_APART
            held.append((apart <= error, apart <= math.hypot(error, other_error)))
    alone, both = np.mean(held, axis=0)
    return Held(float(alone), float(both))


def _whole(documents: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Mean and standard error of a part of the documents; NaN where there is too little."""
    known = [(share, loss) for share, loss in documents if share > 0]
    total = sum(share for share, _ in known)
    part = tuple((share / total, loss) for share, loss in known)
    error = document_error(part)
    return sum(share * loss for share, loss in part), math.nan if error is None else error
