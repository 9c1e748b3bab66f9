"""Trainings from the builtin parent that come with the package: what a search from it knows before its own.

They are the table of the benchmark of searchers, placements by hand, and what a longer search trained, all by the
evaluation of a default search, on another corpus; so they are kept as nats over what the parent loses. None is a result
of a run, or on its front: they tell a searcher what layers are worth, and what to begin with.
"""

import csv
from pathlib import Path

from nas.searchers.strategy import Trained
from search_spaces.notation import parse
from search_spaces.space import SearchSpace

TRAININGS_FILE = Path(__file__).parents[1] / "parents" / "gpt2-small-proxy-trainings.csv"
TOKENS = 327_680  # that each was trained on


def known_trainings(space: SearchSpace, parent_loss: float) -> tuple[Trained, ...]:
    """Those of layers that a space of the parent's dimensions has. parent_loss: nats, on the corpus of a run."""
    layers = set(space.layers)
    with TRAININGS_FILE.open(newline="", encoding="utf-8") as file:
        rows = [(parse(row["notation"], space.base), float(row["nats_over_parent"])) for row in csv.DictReader(file)]
    return tuple(
        Trained(member=member, latency_s=0.0, log_perplexity=parent_loss + over)
        for member, over in rows
        if layers.issuperset(member.architecture.layers)
    )
