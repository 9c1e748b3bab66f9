"""The folded form of an architecture, which is deployed and priced. `nas.conversion.fold` folds the weights.

- A linear FFN, X' = beta X + W X + c, is a change of basis of the residual stream, since attention reads the stream
  through linears. Before the first live norm (one that depends on the data) it folds into the embedding tables; after
  the last live norm of a model whose final norm folds, it folds into the vocabulary projection. Linears between that
  read or write the stream change to the new basis, and the last one that writes it adds the offset c to its bias. The
  beta of other FFNs folds in the same way.
- Frozen norms are linear. They fold into the linears that read them, as gains and biases of live norms do, and inner
  ones into the linears before them.
- A frozen final norm folds into the vocabulary projection. The projection has no bias, so the norm's bias moves to the
  mean of the stream, which is possible only if every norm subtracts the mean. Otherwise a frozen final LayerNorm stays.
- In a shaped block no FFN folds, since values are slices of the stream. There the norm before attention stays from
  layer 1 on, since its output is used as values. With norms after sub-layers neither FFNs nor betas fold. Temperatures
  stay.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from search_spaces.architecture import (
    SCALES,
    Architecture,
    Layer,
    arch_id,
    gelu_form,
    is_live,
    num_heads,
    reader_norms,
    with_layers,
)
from search_spaces.block import Block
from search_spaces.forms import CENTRED_NORMS, LINEAR_FFNS, LIVE_NORMS, Ffn, Inner

UNSCALED: dict[str, Any] = {**dict.fromkeys(SCALES, 1.0), "score_scale": None}  # fields whose factors fold into linears


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Where a change of basis at a layer's FFN can fold.

    ahead: whether it can fold into the embedding, since all live norms of the model are in later layers.
    behind: whether it can fold into the vocabulary projection, since no later layer has a live norm and the final norm
        folds.
    """

    ahead: bool
    behind: bool

    @property
    def is_free(self) -> bool:
        return self.ahead or self.behind


def deployed(architecture: Architecture) -> Architecture:
    """Return the folded architecture, with untied embeddings and without empty layers (except one if all are empty).

    If two architectures have equal folded forms, they run as the same model. A folded one is returned unchanged.
    """
    if architecture.folded:
        return architecture
    block = architecture.block_facts
    layers = [
        deployed_layer(architecture, layer, region, keeps_norm1=block.passes_values(index))
        for index, (layer, region) in enumerate(zip(architecture.layers, regions(architecture), strict=True))
    ]
    final_norm = "none" if folds_final_norm(architecture) else architecture.final_norm
    return with_folded_settings(replace(joined(architecture, layers), final_norm=final_norm))


def with_folded_settings(architecture: Architecture) -> Architecture:
    """Return the architecture with unchanged layers and final norm, and its other fields as they are after folding."""
    return replace(
        architecture, folded=True, bias=deploys_biases(architecture), biases=(), tied_embeddings=False, **UNSCALED
    )


def deploys_biases(architecture: Architecture) -> bool:
    """Whether all linears of layers have a bias after folding: if `bias`, `biases` or the block's norms need one."""
    return architecture.bias or bool(architecture.biases) or architecture.block_facts.has_centred_norms


def deployed_id(architecture: Architecture) -> str:
    """Return the `arch_id` of the folded form, which is equal for all architectures that run as the same model."""
    return arch_id(deployed(architecture))


def folds_final_norm(architecture: Architecture) -> bool:
    """Whether the final norm folds into the vocabulary projection and the stream; True also without a final norm."""
    if architecture.final_norm != "frozen-layernorm":
        return architecture.final_norm not in LIVE_NORMS
    readers = [norm for layer in architecture.layers for norm in reader_norms(layer)]
    return not architecture.block_facts.is_shaped and all(norm in CENTRED_NORMS for norm in readers)


def regions(architecture: Architecture) -> list[Region]:
    """Return a `Region` for every layer's FFN; with norms after sub-layers, a change of basis can fold nowhere."""
    block = architecture.block_facts
    live = [reads_live_norm(block, index, layer) for index, layer in enumerate(architecture.layers)]
    last = max((index for index, its in enumerate(live) if its), default=-1)
    if block.norms_after:  # the output of a linear FFN is normalised before it is added
        return [Region(ahead=False, behind=False)] * architecture.num_layers
    open_end = folds_final_norm(architecture) and not block.is_shaped
    return [Region(ahead=not any(live[: index + 1]), behind=open_end and index >= last) for index in range(len(live))]


def reads_live_norm(block: Block, depth: int, layer: Layer) -> bool:
    """Whether layer `depth` (from 0) has a live norm, except one before attention that makes the stream."""
    return is_live(replace(layer, norm1="none") if block.makes_stream(depth) else layer)


def absorbs(block: Block, layer: Layer, region: Region) -> bool:
    """Whether a layer's FFN folds, as a change of basis of the stream."""
    foldable = not (block.is_shaped or block.norms_after)
    return foldable and region.is_free and layer.ffn in LINEAR_FFNS and layer.norm2 not in LIVE_NORMS


def absorbed_layers(architecture: Architecture) -> list[int]:
    """Return the indices of the layers whose FFN folding removes; empty for an architecture that is folded already."""
    if architecture.folded:
        return []
    around = enumerate(zip(architecture.layers, regions(architecture), strict=True))
    return [index for index, (layer, region) in around if absorbs(architecture.block_facts, layer, region)]


def deployed_layer(architecture: Architecture, layer: Layer, region: Region, *, keeps_norm1: bool = False) -> Layer:
    """Return a layer after folding, which may have neither attention nor FFN.

    keeps_norm1: whether the norm before attention stays even if frozen, because its output is used as values.
    """
    is_absorbed = absorbs(architecture.block_facts, layer, region)
    is_gelu = layer.ffn != "geglu" and gelu_form(architecture, layer) == architecture.gelu
    ffn: Ffn = "gelu" if is_gelu else "fused" if layer.ffn == "identity" else layer.ffn
    keeps_scale = architecture.block_facts.norms_after or not region.is_free
    is_usual_softmax = layer.attention == architecture.softmax  # the architecture's own
    if layer.attention == "softmax-half":
        is_usual_softmax = num_heads(architecture, layer) == architecture.num_heads
    return Layer(
        norm1=layer.norm1 if keeps_norm1 or layer.norm1 in LIVE_NORMS else "none",
        attention="softmax" if is_usual_softmax else layer.attention,
        norm2=layer.norm2 if layer.norm2 in LIVE_NORMS else "none",
        ffn="none" if is_absorbed else ffn,
        stabiliser=layer.stabiliser if keeps_scale else "none",
        inner1=deployed_inner(layer.inner1),
        inner2="own" if is_absorbed else deployed_inner(layer.inner2),
    )


def deployed_inner(inner: Inner) -> Inner:
    """Return `inner1` or `inner2` after folding: `frozen` becomes `none`, since linears take these norms up."""
    return "none" if inner == "frozen" else inner


def joined(architecture: Architecture, layers: Iterable[Layer]) -> Architecture:
    """Return the architecture with the attentions and FFNs of `layers` in as few layers as possible.

    Empty layers are left out, except for one if all are empty. If the block's `join` is `sequential`, a layer without
    FFN and the next layer, if it has no attention, become one, with the `layer_positions` of the first.
    """
    left: list[tuple[int, Layer]] = []
    is_sequential = architecture.block_facts.join == "sequential"
    for place, layer in enumerate(layers):
        if layer.attention == "none" and layer.ffn == "none":
            continue
        first, before = left[-1] if left else (0, None)
        if is_sequential and before is not None and before.ffn == "none" and layer.attention == "none":
            left[-1] = first, replace(layer, norm1=before.norm1, attention=before.attention, inner1=before.inner1)
        else:
            left.append((place, layer))
    places, kept = zip(*left or [(0, Layer(attention="none", ffn="none"))], strict=True)
    return with_layers(architecture, kept, places)
