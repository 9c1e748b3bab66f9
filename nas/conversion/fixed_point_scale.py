"""Scale a trained model by powers of two, so that its numbers fit fixed point; the function stays the same.

Trained decoders have massive activations (25,000 in SmolLM2-135M), whose squares overflow in norms. RMSNorm does not
depend on the scale of its input. Therefore, `with_stream_scale` multiplies the weights that write to the residual
stream by a factor, and divides the weights that read it without a live norm (one that is not frozen). Each halving
costs one bit of every number in the stream. Conversely, some FFNs of Gemma 3 have outputs so small that the squares in
the norm after them have no digits left in fixed point. `with_inner_scales` multiplies the weights before inner norms,
each by a factor of its own: norms of queries and keys, and after attention and FFN.

Source: Sun et al. 2024, "Massive Activations in Large Language Models", arXiv 2402.17762.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nas.conversion.change_of_basis import change_output, inner_norm_linears, stream_readers, stream_writers
from search_spaces.architecture import Architecture
from search_spaces.forms import LIVE_NORMS
from search_spaces.inner import inner_epsilon

LEAST_SQUARE = 2.0**-10  # mean of squares that an inner norm should read: 256 units of 2^-18, 0.2 % in its root


def factor_for(square_share: float) -> float:
    """Return the largest power of two, at most 1, by which to scale the stream so that its squares fit fixed point.

    square_share: largest square in a norm / its limit in fixed point; if it is not finite, the factor is 1.
    """
    if not 1 <= square_share < math.inf:
        return 1.0
    return 2.0 ** (math.ceil(-math.log2(square_share) / 2) - 1)


def inner_factor_for(square_share: float, least_square: float) -> float:
    """Return the power of two by which to scale what an inner norm reads, so that its squares fit fixed point.

    It is below 1 if the largest square is too large. It is above 1 if the least mean of squares is below LEAST_SQUARE
    and the largest square leaves room. square_share: largest square / its limit in fixed point.
    """
    if not square_share < 1 or least_square >= LEAST_SQUARE:
        return factor_for(square_share)
    possible, wanted = -math.log2(square_share) / 2, math.log2(LEAST_SQUARE / least_square) / 2
    return 2.0 ** min(math.ceil(possible) - 1, math.ceil(wanted))


def with_inner_scales(
    architecture: Architecture, weights: Mapping[str, Tensor], factors: Mapping[str, float]
) -> tuple[Architecture, dict[str, Tensor]]:
    """Return architecture and weights of the same model with the input of each inner norm multiplied by its factor.

    The model must not be folded. factors: powers of two by node of a live inner norm; 1 for others.
    """
    new, scales = dict(weights), dict(architecture.inner_scales)
    for norm, kind, linear in inner_norm_linears(architecture):
        if kind in LIVE_NORMS and (factor := factors.get(norm, 1.0)) != 1:
            scales[norm] = scales.get(norm, 1.0) * factor
            change_output(new, linear, torch.tensor(factor))
    return replace(architecture, inner_scales=tuple(scales.items())), new


def with_stream_scale(
    architecture: Architecture, weights: Mapping[str, Tensor], factor: float
) -> tuple[Architecture, dict[str, Tensor]]:
    """Return architecture and weights of the same model with its stream multiplied by `factor` and embeddings untied.

    The model must not be folded. factor: a power of two. The epsilon of norms that read the stream is multiplied by its
    square; inner norms keep theirs. A model with a live LayerNorm, whose epsilon is fixed, or with attention values
    that are slices of the stream is returned unchanged.
    """
    new = dict(weights)
    if "layernorm" in architecture.norms or architecture.block_facts.is_shaped:
        return architecture, new
    new["logits.weight"] = new["embed.weight"] if architecture.tied_embeddings else new["logits.weight"]
    for node in stream_writers(architecture, architecture.num_layers):
        change_output(new, node, torch.tensor(factor))
    for norm, kind, linears in ("final_norm", architecture.final_norm, ["logits"]), *stream_readers(architecture):
        if kind not in LIVE_NORMS:
            for node in linears if kind == "none" else [norm]:
                new[f"{node}.weight"] = new[f"{node}.weight"] / factor
    epsilon, inner = architecture.norm_epsilon * factor**2, architecture.inner_norm_epsilon
    if list(inner_norm_linears(architecture)):  # what inner norms read is not scaled
        inner = inner_epsilon(architecture)
    return replace(architecture, norm_epsilon=epsilon, inner_norm_epsilon=inner, tied_embeddings=False), new
