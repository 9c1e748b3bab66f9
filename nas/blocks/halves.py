"""Half layers, attention or an FFN with the norm before it, and what each does to a parent by itself.

Forms that start as the same function and train alike share a score: a softmax with and without temperature, a leaky
ReLU and a ReLU, one linear and two, an FFN with and without learned scalars.
"""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from costmodel.errors import UserError
from nas.recipe.distillation import student_architecture
from search_spaces.architecture import Architecture, Layer
from search_spaces.optima.stages import Floats, Scores, Stages

Part = Literal["attention", "ffn"]
PARTS: dict[str, Part] = {"attention": "attention", "ffn": "ffn"}

ALIKE = {"softmax-temperature": "softmax", "leaky-relu": "relu", "identity": "fused"}


class Half(NamedTuple):
    """The alternative at one depth. norm, form: as in `Layer`."""

    depth: int
    part: Part
    norm: str
    form: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScores:
    """divergences: KL(parent || parent with that half in place of its own), nats per token; halves of the parent, 0.

    Raises UserError for one that is not finite.
    """

    divergences: Mapping[Half, float]

    def __post_init__(self) -> None:
        if odd := [half for half, value in self.divergences.items() if not math.isfinite(value)]:
            raise UserError(f"block scores must be finite, but that of {odd[0]} is {self.divergences[odd[0]]}.")

    def by_half(self, stages: Stages, parent: Architecture) -> Floats:
        """Half x depth x layer of a space. Raises KeyError for a half without a score."""
        depths = range(len(stages.steps))
        trained = {own: {layer: _trained(parent, own, layer) for layer in stages.layers} for own in set(parent.layers)}
        halves = [[_at(depth, trained[parent.layers[depth]][layer]) for layer in stages.layers] for depth in depths]
        return np.array(
            [[[self.divergences[both[part]] for both in of_depth] for of_depth in halves] for part in range(2)]
        )

    def on(self, stages: Stages, parent: Architecture) -> Scores:
        """Of whole layers, depth x layer of a space. Raises KeyError for a half without a score."""
        scores: Scores = self.by_half(stages, parent).sum(axis=0)
        return scores


def halves_of(parent: Architecture, depth: int, layer: Layer) -> tuple[Half, Half]:
    """The halves that a layer is trained as, on the way from a parent."""
    return _at(depth, _trained(parent, parent.layers[depth], layer))


def _trained(parent: Architecture, own: Layer, layer: Layer) -> Layer:
    """What a layer is trained as in place of one of the parent's."""
    return student_architecture(replace(parent, layers=(layer,)), replace(parent, layers=(own,)), spread=False).layers[
        0
    ]


def _at(depth: int, trained: Layer) -> tuple[Half, Half]:
    return (
        Half(depth, "attention", trained.norm1, ALIKE.get(trained.attention, trained.attention)),
        Half(depth, "ffn", trained.norm2, ALIKE.get(trained.ffn, trained.ffn)),
    )


def written(scores: BlockScores) -> str:
    """As CSV."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*Half._fields, "kl_nats"])
    table.writerows([*half, repr(value)] for half, value in sorted(scores.divergences.items()))
    return text.getvalue()


def read(text: str, name: str) -> BlockScores:
    """What `written` wrote. Raises UserError, naming the file, if it is damaged."""
    try:
        rows = csv.DictReader(io.StringIO(text))
        found = {
            Half(int(row["depth"]), PARTS[row["part"]], row["norm"], row["form"]): float(row["kl_nats"]) for row in rows
        }
        return BlockScores(divergences=found)
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(f"{name} must be a table of block scores, but: {error}; delete it to make it anew.") from None
