"""Inner norms and caps: norms of queries and keys, norms after attention and FFN, and caps of scores.

A block states which of these norms its layers have, an architecture states the score cap, and the fields `inner1` and
`inner2` of a layer state what that layer keeps of both.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from costmodel.errors import UserError
from search_spaces.forms import INNERS, Inner, Norm

if TYPE_CHECKING:
    from search_spaces.architecture import Architecture, Layer


def inner_choices(architecture: "Architecture") -> dict[str, tuple[Inner, ...]]:
    """Return the values that `inner1` and `inner2` may have in an unfolded model: field -> values, `own` first."""
    block = architecture.block_facts
    after: tuple[Inner, ...] = ("frozen",) if block.norms_after else ()
    inside: tuple[Inner, ...] = after or (("frozen",) if block.query_key_norm != "none" else ())
    uncapped: tuple[Inner, ...] = () if architecture.score_cap is None else ("uncapped",)
    return {"inner1": ("own", *uncapped, *inside), "inner2": ("own", *after)}


def require_inner(architecture: "Architecture") -> None:
    """Raise UserError for an `inner1` or `inner2` that changes norms or caps that the architecture does not have.

    Also if a factor of `inner_scales` is not positive and finite.
    """
    for norm, scale in architecture.inner_scales:
        if not 0 < scale < math.inf:
            raise UserError(f"a factor of `inner_scales` must be finite and above 0, but got {scale} for {norm}.")
    for name, offered in inner_choices(architecture).items():
        chosen = {getattr(layer, name) for layer in architecture.layers}
        if odd := chosen.difference(offered, ("none",) * ("frozen" in offered)):
            raise UserError(
                f"`{name}` of a layer must be one of {', '.join(offered)}, since block {architecture.block!r} has no "
                f"other norms or caps to change, but got {min(odd)!r}."
            )


def inner_norms(architecture: "Architecture", layer: "Layer") -> dict[str, Norm]:
    """Return the inner norms of a layer that are not folded: node in the layer, such as `attention.q_norm` -> norm."""
    block, inside, behind = architecture.block_facts, INNERS[layer.inner1].norm, INNERS[layer.inner2].norm
    kinds: dict[str, Norm] = {}
    if layer.attention != "none" and inside != "none":
        heads = ("q_norm", "k_norm") if block.query_key_norm != "none" else ()
        kinds = {f"attention.{name}": inside for name in (*heads, *(["norm"] if block.norms_after else []))}
    if layer.ffn != "none" and behind != "none" and block.norms_after:
        kinds["ffn.norm"] = behind
    return kinds


def inner_epsilon(architecture: "Architecture", norm: str = "") -> float:
    """Return the constant that an inner norm adds to the mean square; without a node, that of unscaled ones."""
    scale = dict(architecture.inner_scales).get(norm, 1.0)
    return (architecture.inner_norm_epsilon or architecture.norm_epsilon) * scale**2


def keeps_cap(layer: "Layer") -> bool:
    """Whether a layer keeps the score cap, if its architecture has one."""
    return layer.attention != "none" and INNERS[layer.inner1].is_capped


def implied_logit_cap(architecture: "Architecture", layers: Iterable["Layer"]) -> float | None:
    """Return the logit cap that the architecture would have with these layers.

    This is None if the architecture has no logit cap, or has a score cap that none of the layers keeps. The order of
    the logits is the same with and without the cap.
    """
    stays = architecture.score_cap is None or any(map(keeps_cap, layers))
    return architecture.logit_cap if stays else None


def score_cap(architecture: "Architecture", layer: "Layer") -> float | None:
    """Return the score cap of a layer (scores x become cap * tanh(x / cap)); None if its scores are not capped."""
    return architecture.score_cap if keeps_cap(layer) else None


def queries(architecture: "Architecture", layer: "Layer") -> str:
    """Return the node of a layer whose weights can scale the queries: the queries' norm, or else their linear."""
    normed = "attention.q_norm"
    return normed if normed in inner_norms(architecture, layer) else architecture.block_facts.queries
