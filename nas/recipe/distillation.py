"""The distillation schedule: how a trained parent is turned into a candidate, and what is removed when.

Norms are frozen one after another (`Freezing`), attention and FFNs to be removed are gated to zero, and linear FFNs
start as the closest fit. If all were removed at once, the model would not recover within minutes on a laptop.
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

KINDS: dict[PartKind, tuple[str, ...]] = {  # kind of part -> fields of `Layer` that describe it
    "attention": ("norm1", "attention", "inner1"),
    "ffn": ("norm2", "ffn", "stabiliser", "inner2"),
}
EMPTY = Layer(attention="none", ffn="none")
FROZEN: dict[Norm, Norm] = {"layernorm": "frozen-layernorm", "rmsnorm": "frozen-rmsnorm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationSchedule:
    """The steps by which a candidate is made from its parent.

    Args:
        parent: digest of the parent's architecture, weights and tokenizer (`nas.conversion.parent`).
        placement: layer codes of the parent (`search_spaces.notation`).
        start_share: share of the steps before the gates of removed parts begin to fall linearly from 1 to 0.
        end_share: share of the steps before these gates reach 0.
        prediction_weight: weight of the parent's predictions in the loss; the rest is for the next token.
        spread_over_depth: whether layers before a tail of empty ones start from layers spread evenly over the parent's
            depth (see `spread_layers`), or from its first layers.
        linear_fit_tokens: training tokens on which linear or polynomial FFNs, and queries of eighth powers, are fitted
            to the parent (`nas.conversion.linear_fit`); without effect if there are `blockwise_tokens`.
        teacher_top_k: most likely tokens in the teacher cache for each prediction; the rest of the vocabulary counts
            as one more.
        trainable: the part of the model that is trained. all: the whole model. changed: attention, FFNs and final norm
            that differ from the parent's, and the sub-layers next to removed ones. neighbours: also the sub-layers next
            to any that differ. If nothing differs, the whole model is trained.
        blockwise_tokens: tokens on which each new sub-layer is first trained on its own, on the parent's hidden states
            (`nas.training.distillation.library`); 0 to start from the parent's weights.
        kept_layers: number of first layers that stay exactly the parent's, with its embedding; None if all may be
            trained.
        hidden_state_weight: weight, in the loss, of the hidden states' relative error against the parent's.
        weight_rms: root mean square of the weights of the parent's linears, without the output table; None if unknown.

    Raises UserError if a share, weight or number of tokens is out of range.
    """

    parent: str
    placement: str
    start_share: float = 0.0
    end_share: float = 0.05
    prediction_weight: float = 0.95
    spread_over_depth: bool = False
    linear_fit_tokens: int = 8_192  # a sixth less divergence than 1,024; more do not help
    teacher_top_k: int = 16
    trainable: Trainable = "all"
    blockwise_tokens: int = 0
    hidden_state_weight: float = 0.0
    kept_layers: int | None = None
    weight_rms: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_share < self.end_share <= 1:
            raise UserError(
                f"a distillation schedule needs 0 <= `start_share` < `end_share` <= 1, but got {self.start_share}, "
                f"{self.end_share}."
            )
        if not 0 <= self.prediction_weight <= 1:
            raise UserError(f"`prediction_weight` of a schedule must be from 0 to 1, but got {self.prediction_weight}.")
        if not 0 <= (weight := self.hidden_state_weight) < math.inf:
            raise UserError(f"`hidden_state_weight` of a schedule must be finite and not negative, but got {weight}.")
        for name, least in (("linear_fit_tokens", 1), ("teacher_top_k", 1), ("blockwise_tokens", 0)):
            if (value := getattr(self, name)) < least:
                raise UserError(f"`{name}` of a schedule must be at least {least}, but got {value}.")

    def gate_at(self, step: int, num_steps: int) -> float:
        """Return the factor of removed parts after `step` steps, 0 to num_steps; it falls from 1 to 0."""
        begin, end = self.start_share * num_steps, self.end_share * num_steps
        return min(1.0, max(0.0, (end - step) / (end - begin)))


class Part(NamedTuple):
    """A part of a layer: its attention or its FFN. layer: index of the layer."""

    layer: int
    kind: PartKind


def parent_architecture(distillation: DistillationSchedule, dimensions: Architecture) -> Architecture:
    """Return the parent's architecture. Raises UserError if the placement does not fit the number of layers.

    dimensions: differs from the parent's architecture at most in layers and final norm, and in the logit cap, which is
        not restored if it lacks one.
    """
    return parse(distillation.placement, dimensions).architecture


def student_architecture(target: Architecture, parent: Architecture, *, spread: bool) -> Architecture:
    """Return the architecture to train for a target if training starts from a parent.

    Where the parent has a norm and the target has none or a frozen one, the result has the parent's norm, frozen; as
    final norm only if the folded model stays the same. FFN `identity`, two linears, becomes one linear, `fused`, unless
    the parent has `identity` too. Target and result fold to the same model, except if a frozen final LayerNorm folds in
    one of them only. spread: whether to place the layers by `spread_layers`.
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
    """Return the layers; if two or more are followed by a tail of two or more empty ones, spread evenly over the depth.

    A tail of empty layers fixes the number of the others, but not the parent layers from which they start. Five
    layers that start spread over the builtin parent reach a perplexity of 9.86; five that start as its first layers
    reach 15.3 (docs/research-log.md).
    """
    kept = [layer for layer in layers if layer != EMPTY]
    if len(kept) < 2 or len(layers) - len(kept) < 2 or EMPTY in layers[: len(kept)]:
        return tuple(layers)
    placed = [EMPTY] * len(layers)
    for index, layer in enumerate(kept):
        placed[round(index * (len(layers) - 1) / (len(kept) - 1))] = layer
    return tuple(placed)


def initial_architecture(trained: Architecture, parent: Architecture) -> Architecture:
    """Return the architecture at the start of training, with the parent's attention and FFNs that will be removed."""
    layers = list(trained.layers)
    for index, kind in removed_parts(trained, parent):
        part = {name: getattr(parent.layers[index], name) for name in KINDS[kind]}
        layers[index] = replace(layers[index], **part)
    return replace(trained, layers=tuple(layers))


def removed_parts(trained: Architecture, parent: Architecture) -> Iterator[Part]:
    """Yield each attention or FFN of the parent where the trained architecture has none, layer by layer."""
    for index, (layer, theirs) in enumerate(zip(trained.layers, parent.layers, strict=True)):
        yield from (Part(index, kind) for kind in KINDS if getattr(layer, kind) == "none" != getattr(theirs, kind))


def trained_parts(trained: Architecture, parent: Architecture, trainable: Trainable) -> list[Part] | None:
    """Return the attention and FFNs to train, in order; None for the whole model. trainable: as in the schedule."""
    places = [Part(index, kind) for index in range(parent.num_layers) for kind in KINDS]
    reach = dict.fromkeys(removed_parts(trained, parent), 1)  # neighbours of removed parts must compensate for them
    for part in places:
        ours, theirs = trained.layers[part.layer], parent.layers[part.layer]
        if any(getattr(ours, name) != getattr(theirs, name) for name in KINDS[part.kind]):
            reach.setdefault(part, int(trainable == "neighbours"))
    if trainable == "all" or not (reach or trained.final_norm != parent.final_norm):
        return None
    near = {at for part, far in reach.items() for at in range(places.index(part) - far, places.index(part) + far + 1)}
    return [part for at, part in enumerate(places) if at in near]


def fitted_parts(trained: Architecture, parent: Architecture) -> list[Part]:
    """Return the parts to fit to the parent's: attention that gets eighth powers, FFNs made linear or polynomial."""
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
    """Return the degree of the polynomial that is fitted to the activation of the parent's layer `theirs`; else None.

    form: the FFN that replaces the parent's. A square without a gate is fitted only if the parent's FFN has no gate
    either, and its `down` has a bias.
    """
    if theirs.ffn in (form, "none", *LINEAR_FFNS):
        return None
    if form == "square" and (FFNS[theirs.ffn].is_gated or not has_bias(parent, theirs, "ffn.down")):
        return None
    return POLYNOMIALS.get(form)


def _norm(wanted: Norm, theirs: Norm) -> Norm:
    return wanted if wanted in LIVE_NORMS or theirs == "none" else FROZEN.get(theirs, theirs)
