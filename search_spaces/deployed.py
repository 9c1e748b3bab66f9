"""The deployed form, which exact algebra leaves of a trained architecture: what is run, and so what is paid for.

Attention reads the residual stream through linears, so between two nonlinear readers of the stream (norms that depend
on the data, and the head behind a final one) a linear FFN `X' = beta X + W X + c` is only a change of the stream's
coordinates. A change ahead of the first live norm goes into the embedding tables, one behind the last live norm of a
net without a final one into the vocabulary projection; each linear between takes up its part. Frozen norms are linear
and go into the linears that read them, as gain and bias of live ones do. What a change of basis adds behind the last
live norm goes into the bias of the last linear that writes to the stream.

A frozen final norm goes into the vocabulary projection. That has no bias, so the norm's own must come from the stream:
by its mean, which is free where every reader takes the mean away. Elsewhere a frozen final LayerNorm stays.

Of a shaped block no FFN is absorbed: its heads pass on slices of the stream itself, which only a multiple of the
identity leaves alone; and the norm before attention stays in later layers, where values are read from it. A temperature
that depends on the position stays; one scalar a head would fold, but that is a matter of weights, not of the
architecture.

`nas.conversion.fold` does the same to weights.
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

UNSCALED: dict[str, Any] = {**dict.fromkeys(SCALES, 1.0), "score_scale": None}  # what linears take up


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """The place of a layer's FFN in the residual stream.

    ahead: it precedes every live norm, also its own layer's, so the embedding absorbs changes of basis.
    behind: the last live norm, so that the vocabulary projection takes them up.
    """

    ahead: bool
    behind: bool

    @property
    def is_free(self) -> bool:
        return self.ahead or self.behind


def deployed(architecture: Architecture) -> Architecture:
    """The folded architecture, in its one form: no empty layer, tables untied, biases everywhere.

    Equal results are the same model to run, whatever was trained; a folded architecture is its own deployed form.
    """
    if architecture.folded:
        return architecture
    block = architecture.block_facts
    layers = [
        deployed_layer(architecture, layer, region, keeps_norm1=block.passes_values(index))
        for index, (layer, region) in enumerate(zip(architecture.layers, regions(architecture), strict=True))
    ]
    return replace(
        with_layers(architecture, joined_layers(block, layers), joined_places(block, layers)),
        final_norm="none" if folds_final_norm(architecture) else architecture.final_norm,
        bias=deploys_biases(architecture),
        tied_embeddings=False,
        folded=True,
        **UNSCALED,
    )


def deploys_biases(architecture: Architecture) -> bool:
    """Whether every linear carries a bias once a norm may have left its own; else those that did before."""
    return architecture.bias or architecture.block_facts.has_centred_norms


def deployed_id(architecture: Architecture) -> str:
    """The `arch_id` of the deployed form: equal for all that are the same model to run."""
    return arch_id(deployed(architecture))


def folds_final_norm(architecture: Architecture) -> bool:
    """Whether the vocabulary projection and the stream can take up the final norm, if there is one."""
    if architecture.final_norm != "frozen-layernorm":
        return architecture.final_norm not in LIVE_NORMS
    readers = [norm for layer in architecture.layers for norm in reader_norms(layer)]
    return not architecture.block_facts.is_shaped and all(norm in CENTRED_NORMS for norm in readers)


def regions(architecture: Architecture) -> list[Region]:
    """Returns the place of every layer's FFN."""
    block = architecture.block_facts
    live = [reads_live_norm(block, index, layer) for index, layer in enumerate(architecture.layers)]
    last = max((index for index, its in enumerate(live) if its), default=-1)
    if block.norms_after:  # what a linear FFN makes is not added as it is
        return [Region(ahead=False, behind=False)] * architecture.num_layers
    open_end = folds_final_norm(architecture) and not block.is_shaped
    return [Region(ahead=not any(live[: index + 1]), behind=open_end and index >= last) for index in range(len(live))]


def reads_live_norm(block: Block, depth: int, layer: Layer) -> bool:
    """Whether a norm that stays live reads the stream in a layer, and not only what becomes the stream."""
    return is_live(replace(layer, norm1="none") if block.makes_stream(depth) else layer)


def absorbs(block: Block, layer: Layer, region: Region) -> bool:
    """Whether a layer's FFN vanishes into a change of basis of the stream."""
    foldable = not (block.is_shaped or block.norms_after)
    return foldable and region.is_free and layer.ffn in LINEAR_FFNS and layer.norm2 not in LIVE_NORMS


def absorbed_layers(architecture: Architecture) -> list[int]:
    """The layers of a trained architecture whose FFN vanishes; none of one that is folded already."""
    if architecture.folded:
        return []
    around = enumerate(zip(architecture.layers, regions(architecture), strict=True))
    return [index for index, (layer, region) in around if absorbs(architecture.block_facts, layer, region)]


def deployed_layer(architecture: Architecture, layer: Layer, region: Region, *, keeps_norm1: bool = False) -> Layer:
    """Returns what is left of a layer: maybe neither attention nor FFN."""
    is_absorbed = absorbs(architecture.block_facts, layer, region)
    keeps_scale = architecture.block_facts.norms_after or not region.is_free
    return Layer(
        norm1=layer.norm1 if keeps_norm1 or layer.norm1 in LIVE_NORMS else "none",
        attention="softmax" if _is_usual_softmax(architecture, layer) else layer.attention,
        norm2=layer.norm2 if layer.norm2 in LIVE_NORMS else "none",
        ffn="none" if is_absorbed else _deployed_ffn(architecture, layer),
        stabiliser=layer.stabiliser if keeps_scale else "none",
        inner1=deployed_inner(layer.inner1),
        inner2="own" if is_absorbed else deployed_inner(layer.inner2),
    )


def deployed_inner(inner: Inner) -> Inner:
    """What is left of a sub-layer's inner norms and caps: frozen norms go into the linears before them."""
    return "none" if inner == "frozen" else inner


def _is_usual_softmax(architecture: Architecture, layer: Layer) -> bool:
    """Whether the form that a layer names is that of the architecture."""
    if layer.attention == "softmax-half":
        return num_heads(architecture, layer) == architecture.num_heads
    return layer.attention == architecture.softmax


def _deployed_ffn(architecture: Architecture, layer: Layer) -> Ffn:
    if layer.ffn != "geglu" and gelu_form(architecture, layer) == architecture.gelu:
        return "gelu"
    return "fused" if layer.ffn == "identity" else layer.ffn


def joined_layers(block: Block, layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """The same sub-blocks in as few layers as can be: one empty layer where there are none.

    Attention without an FFN and an FFN without attention behind it are one layer where they follow one another, not
    where they stand side by side (`parallel`).
    """
    return tuple(layer for _, layer in _joined(block, layers)) or (Layer(attention="none", ffn="none"),)


def joined_places(block: Block, layers: Iterable[Layer]) -> tuple[int, ...]:
    """Of each of the `joined_layers`, the place that its attention had, or else its FFN."""
    return tuple(place for place, _ in _joined(block, layers)) or (0,)


def _joined(block: Block, layers: Iterable[Layer]) -> list[tuple[int, Layer]]:
    joined: list[tuple[int, Layer]] = []
    for place, layer in enumerate(layers):
        if layer.attention == "none" and layer.ffn == "none":
            continue
        first, before = joined[-1] if joined else (0, None)
        if block.join == "sequential" and before is not None and before.ffn == "none" and layer.attention == "none":
            joined[-1] = (
                first,
                replace(before, norm2=layer.norm2, ffn=layer.ffn, stabiliser=layer.stabiliser, inner2=layer.inner2),
            )
        else:
            joined.append((place, layer))
    return joined
