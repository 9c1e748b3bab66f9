"""Sub-layers (attention or an FFN with the norm before it), and the block scores of replacing a parent's sub-layer.

Forms that start as the same function and train in the same way share a score: a softmax with and without temperature or
bounds, a leaky ReLU and a ReLU, an FFN of one linear and of two, an FFN with and without learned scalars.
"""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from costmodel.errors import UserError
from nas.recipe.distillation import KINDS, PartKind, student_architecture
from search_spaces.architecture import Architecture, Layer, with_layers
from search_spaces.optima import Floats, Stages

PARTS: dict[str, PartKind] = {kind: kind for kind in KINDS}
# form of attention or FFN -> the form whose score it shares
ALIKE = {"softmax-temperature": "softmax", "bounded": "softmax", "leaky-relu": "relu", "identity": "fused"}


class SubLayer(NamedTuple):
    """Attention or an FFN at one depth, from 0.

    norm, form, inner: norm1, attention, inner1 of its `Layer`, or norm2, ffn, inner2; `ALIKE` replaces some forms.
    """

    depth: int
    part: PartKind
    norm: str
    form: str
    inner: str = "own"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScores:
    """Block scores of sub-layers. Raises UserError for a score that is not finite.

    divergences: KL(parent || parent with this sub-layer), nats per token; 0 for the parent's own sub-layers.
    """

    divergences: Mapping[SubLayer, float]

    def __post_init__(self) -> None:
        if odd := [sub_layer for sub_layer, value in self.divergences.items() if not math.isfinite(value)]:
            raise UserError(f"block scores must be finite, but that of {odd[0]} is {self.divergences[odd[0]]}.")

    def by_layer(self, stages: Stages, parent: Architecture) -> Floats:
        """Return the scores of a space's layers, (attention, FFN) x depths x `stages.layers`.

        A layer that the space does not allow at a depth has 0. Raises KeyError if a score is missing.
        """
        scores = np.zeros((2, *stages.shape))
        for depth, edges in enumerate(stages.steps):
            for number in set(edges.layer):
                pair = sub_layers_of(parent, depth, stages.layers[number])
                scores[:, depth, number] = [self.divergences[sub_layer] for sub_layer in pair]
        return scores


def sub_layers_of(parent: Architecture, depth: int, layer: Layer) -> tuple[SubLayer, SubLayer]:
    """Return the attention and FFN that are trained for `layer` at `depth` if a candidate starts from `parent`."""
    alone = with_layers(parent, (layer,), (depth,)), with_layers(parent, (parent.layers[depth],), (depth,))
    (trained,) = student_architecture(*alone, spread=False).layers
    return _sub_layers(depth, trained)


def trained_sub_layers(trained: Architecture) -> set[SubLayer]:
    """Return the attention and the FFN of every layer; a removed sub-layer is there with form `none`."""
    return {sub_layer for depth, layer in enumerate(trained.layers) for sub_layer in _sub_layers(depth, layer)}


def _sub_layers(depth: int, trained: Layer) -> tuple[SubLayer, SubLayer]:
    return (
        SubLayer(depth, "attention", trained.norm1, ALIKE.get(trained.attention, trained.attention), trained.inner1),
        SubLayer(depth, "ffn", trained.norm2, ALIKE.get(trained.ffn, trained.ffn), trained.inner2),
    )


def to_csv(scores: BlockScores) -> str:
    """Return the scores as CSV with a header, in nats per token."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*SubLayer._fields, "kl_nats"])
    table.writerows([*sub_layer, repr(value)] for sub_layer, value in sorted(scores.divergences.items()))
    return text.getvalue()


def from_csv(text: str, name: str) -> BlockScores:
    """Return the scores in a text of `to_csv`. Raises UserError with the file's `name` if the text is damaged."""
    try:
        divergences = {}
        for row in csv.DictReader(io.StringIO(text)):
            norm, form, inner = row["norm"], row["form"], row.get("inner", "own")
            divergences[SubLayer(int(row["depth"]), PARTS[row["part"]], norm, form, inner)] = float(row["kl_nats"])
        return BlockScores(divergences=divergences)
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise UserError(f"{name} must be a table of block scores, but: {error}; delete it to make it anew.") from None
