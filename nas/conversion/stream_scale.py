"""Scales the residual stream down, so that fixed point can represent the squares that norms take of it.

Trained decoders have massive activations (25,000 in SmolLM2-135M), whose squares overflow the ring. RMSNorm does not
depend on the scale of its input, so everything that is written to the stream is multiplied by a factor, and what reads
it without a live norm is divided by it. Each halving costs one bit of every number in the stream.

Source: Sun et al. 2024, "Massive Activations in Large Language Models", arXiv 2402.17762.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from nas.conversion.change_of_basis import stream_readers, stream_writers
from search_spaces.architecture import Architecture
from search_spaces.forms import LIVE_NORMS


def factor_for(square_share: float) -> float:
    """Return the largest power of two, at most 1, by which the stream is scaled so that its squares fit fixed point.

    square_share: largest square / limit.
    """
    return 1.0 if square_share < 1 else 2.0 ** (math.ceil(-math.log2(square_share) / 2) - 1)


def with_stream_scale(
    architecture: Architecture, weights: Mapping[str, Tensor], factor: float
) -> tuple[Architecture, dict[str, Tensor]]:
    """Return the same unfolded model with its stream multiplied by this factor, a power of two.

    A model with a LayerNorm is unchanged: its epsilon would have to shrink too, but is no setting of a model.
    """
    new = dict(weights)
    if "layernorm" in architecture.norms or architecture.block_facts.is_shaped:
        return architecture, new
    new["logits.weight"] = new["embed.weight"] if architecture.tied_embeddings else new["logits.weight"]
    written = stream_writers(architecture, architecture.num_layers)
    for parameter in (f"{node}.{suffix}" for node in written for suffix in ("weight", "bias")):
        if parameter in new:
            new[parameter] = new[parameter] * factor
    for norm, kind, linears in ("final_norm", architecture.final_norm, ["logits"]), *stream_readers(architecture):
        if kind not in LIVE_NORMS:
            for node in linears if kind == "none" else [norm]:
                new[f"{node}.weight"] = new[f"{node}.weight"] / factor
    epsilon = architecture.norm_epsilon * factor**2
    return replace(architecture, norm_epsilon=epsilon, tied_embeddings=False), new
