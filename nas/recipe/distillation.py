"""The schedule from a trained parent to a candidate: what the parent has and the candidate lacks goes step by step.

Norms are frozen one after another (`Freezing`), attention and FFNs are gated down to nothing, linear FFNs start as what
is nearest to the parent's; meanwhile and after that the candidate learns from the parent's predictions. Cut off at
once, what a trained model leans on is not learned back in a laptop's minutes. The candidate is the target; the schedule
is a part of its recipe.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from costmodel.errors import UserError
from search_spaces.architecture import Architecture, Layer, has_bias, softmax_form
from search_spaces.deployed import deployed
from search_spaces.forms import FFNS, LINEAR_FFNS, LIVE_NORMS, POLYNOMIALS, Norm
from search_spaces.notation import parse

PartKind = Literal["attention", "ffn"]
Trainable = Literal["all", "changed", "neighbours"]

KINDS: dict[PartKind, tuple[str, ...]] = {  # with the fields of a layer that it consists of
    "attention": ("norm1", "attention"),
    "ffn": ("norm2", "ffn", "stabiliser"),
}
EMPTY = Layer(attention="none", ffn="none")
FROZEN: dict[Norm, Norm] = {"layernorm": "frozen-layernorm", "rmsnorm": "frozen-rmsnorm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationSchedule:
    """The steps by which a candidate is made from its parent.

    Args:
        parent: digest of the parent's weights (`nas.conversion.parent`).
        placement: the parent's layers, typed.
        start_share: share of the steps before the gates of what goes begin to fall from 1 to 0, linearly.
        end_share: share of the steps before they are at 0.
        distillation: share of the parent's predictions in what the loss compares with; the rest is the next token.
        spread: whether layers before a tail of empty ones take the weights of the parent's evenly over its depth (see
            `spread_layers`), or those of its first ones.
        linear_fit_tokens: of training, over which parts are fitted to the parent's (`nas.conversion.linear_fit`).
        most_likely: tokens of each of the parent's predictions; the rest of the vocabulary counts as one more.
        trainable: what of the model is trained: all; changed, the attention, FFNs and final norm that are not the
            parent's, with the neighbours of those that go; neighbours, these with what is just before and after each.
        blockwise_tokens: over which each sub-layer that is not the parent's is first trained by itself on the parent's
            streams (`nas.training.distillation.library`); 0 to start from the parent's weights.
        kept_layers: so many first layers stay the parent's to the bit, with its embedding; None where any may be
            trained.
        streams: weight of how far the stream that each layer leaves is from the parent's (`nas.training.objective`).

    Raises UserError if a number is out of its range.
    """

    parent: str
    placement: str
    start_share: float = 0.0
    end_share: float = 0.05
    distillation: float = 0.95
    spread: bool = False
    linear_fit_tokens: int = 8_192  # the divergence of a layer falls by a sixth from 1,024 on, and no further
    most_likely: int = 16
    trainable: Trainable = "all"
    blockwise_tokens: int = 0
    streams: float = 0.0
    kept_layers: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_share < self.end_share <= 1:
            raise UserError(
                f"a distillation schedule needs 0 <= `start_share` < `end_share` <= 1, but got {self.start_share}, "
                f"{self.end_share}."
            )
        if not 0 <= self.distillation <= 1:
            raise UserError(f"`distillation` of a schedule must be from 0 to 1, but got {self.distillation}.")
        if not 0 <= self.streams < math.inf:
            raise UserError(f"`streams` of a schedule must be finite and not negative, but got {self.streams}.")
        for name, least in (("linear_fit_tokens", 1), ("most_likely", 1), ("blockwise_tokens", 0)):
            if (value := getattr(self, name)) < least:
                raise UserError(f"`{name}` of a schedule must be at least {least}, but got {value}.")

    def gate_at(self, step: int, num_steps: int) -> float:
        """The share of the removed parts that is left after step 0, 1, ..., num_steps."""
        begin, end = self.start_share * num_steps, self.end_share * num_steps
        return min(1.0, max(0.0, (end - step) / (end - begin)))


class Part(NamedTuple):
    """A part of a layer that goes: its attention or its FFN."""

    layer: int
    kind: PartKind


def parent_architecture(route: DistillationSchedule, dimensions: Architecture) -> Architecture:
    """The parent's placement. dimensions: any architecture of the parent's dimensions and depth."""
    return parse(route.placement, dimensions).architecture


def student_architecture(target: Architecture, parent: Architecture, *, spread: bool) -> Architecture:
    """Returns what is trained for a target, which deploys alike.

    Where the parent has a norm and the target has none, or a frozen one, the parent's is frozen; two linears, where the
    parent has not just those, are one; `spread_layers`, unless they are to stay.
    """
    placed = spread_layers(target.layers) if spread else target.layers
    layers = tuple(
        replace(
            layer,
            norm1=_norm(layer.norm1, theirs.norm1) if layer.attention != "none" else "none",
            norm2=_norm(layer.norm2, theirs.norm2) if layer.ffn != "none" else "none",
            ffn="fused" if layer.ffn == "identity" != theirs.ffn else layer.ffn,
        )
        for layer, theirs in zip(placed, parent.layers, strict=True)
    )
    trained = replace(target, layers=layers, final_norm=_norm(target.final_norm, parent.final_norm))
    return trained if deployed(trained) == deployed(target) else replace(trained, final_norm=target.final_norm)


def spread_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Layers followed by two or more empty ones, evenly over the depth; others as they are.

    Such a tail says how many layers there are, not which of the parent's they are made of. From the builtin parent,
    327,680 tokens, one seed, perplexity by which of its layers are kept (`python -m nas.train ARCH --parent builtin`):

        11  9.39 (without 5)       9.32 (the first)
        10  7.84 (without 3, 8)    7.88 (without 5, 9)     8.12 (the first)
         5  9.86 (0, 3, 6, 8, 11)  9.99 (0, 3, 6, 9, 11)  10.33 (0, 2, 5, 8, 11)  12.5 (0 to 3, 11)  15.3 (0 to 4)
         3 14.40 (0, 6, 11)       14.08 (0, 5, 11)        25.9 (0 to 2)
    """
    kept = [layer for layer in layers if layer != EMPTY]
    if len(kept) < 2 or len(layers) - len(kept) < 2 or EMPTY in layers[: len(kept)]:
        return tuple(layers)
    placed = [EMPTY] * len(layers)
    for index, layer in enumerate(kept):
        placed[round(index * (len(layers) - 1) / (len(kept) - 1))] = layer
    return tuple(placed)


def initial_architecture(trained: Architecture, parent: Architecture) -> Architecture:
    """The architecture at the start of training: with the parent's attention and FFN where these are yet to go."""
    layers = list(trained.layers)
    for index, kind in removed_parts(trained, parent):
        part = {name: getattr(parent.layers[index], name) for name in KINDS[kind]}
        layers[index] = replace(layers[index], **part)
    return replace(trained, layers=tuple(layers))


def removed_parts(trained: Architecture, parent: Architecture) -> Iterator[Part]:
    """Every part of the parent that the trained architecture lacks, layer by layer."""
    for index, (layer, theirs) in enumerate(zip(trained.layers, parent.layers, strict=True)):
        yield from (Part(index, kind) for kind in KINDS if getattr(layer, kind) == "none" != getattr(theirs, kind))


def trained_parts(trained: Architecture, parent: Architecture, trainable: Trainable) -> list[Part] | None:
    """The attention and FFNs that are trained, in order; None for all of the model, also where nothing is changed."""
    places = [Part(index, kind) for index in range(parent.num_layers) for kind in KINDS]
    reach = dict.fromkeys(removed_parts(trained, parent), 1)  # what goes leaves its neighbours to heal
    for part in places:
        ours, theirs = trained.layers[part.layer], parent.layers[part.layer]
        if any(getattr(ours, name) != getattr(theirs, name) for name in KINDS[part.kind]):
            reach.setdefault(part, int(trainable == "neighbours"))
    if trainable == "all" or not (reach or trained.final_norm != parent.final_norm):
        return None
    near = {at for part, far in reach.items() for at in range(places.index(part) - far, places.index(part) + far + 1)}
    return [part for at, part in enumerate(places) if at in near]


def fitted_parts(trained: Architecture, parent: Architecture) -> list[Part]:
    """What is fitted to the parent's: attention by eighth powers, FFNs that are one linear or have a polynomial."""
    fitted = []
    for index, (layer, theirs) in enumerate(zip(trained.layers, parent.layers, strict=True)):
        if "none" not in (layer.attention, theirs.attention):
            ours, parents = softmax_form(trained, layer), softmax_form(parent, theirs)
            fitted += [Part(index, "attention")] if ours == "power8" != parents else []
        is_linear = layer.ffn == "fused" and theirs.ffn not in (*LINEAR_FFNS, "none")
        if is_linear or fitted_degree(layer.ffn, theirs, parent):
            fitted.append(Part(index, "ffn"))
    return fitted


def fitted_degree(form: str, theirs: Layer, parent: Architecture) -> int | None:
    """The degree of the polynomial that an FFN of this form has where the parent's layer has another activation; None
    for other forms.

    A square without a gate is a polynomial of what the parent's activation reads only if that has none either, and its
    linears have biases.
    """
    if theirs.ffn in (form, "none", *LINEAR_FFNS):
        return None
    if form == "square" and (FFNS[theirs.ffn].is_gated or not has_bias(parent, theirs, "ffn.down")):
        return None
    return POLYNOMIALS.get(form)


def _norm(wanted: Norm, theirs: Norm) -> Norm:
    return wanted if wanted in LIVE_NORMS or theirs == "none" else FROZEN.get(theirs, theirs)
