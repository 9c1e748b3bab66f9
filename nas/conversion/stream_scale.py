"""A residual stream made smaller, so that fixed point holds the squares that norms take of it.

Trained decoders have massive activations: a few features of the first position are thousands of times the others
(25,000 in SmolLM2-135M), and their squares are beyond the ring. RMSNorm does not see what its input is multiplied by:
all that is written to the stream is multiplied, what reads it without a live norm divides, and the model computes the
same. Each halving costs a bit of every number in the stream.

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
    """The largest power of two, at most 1, that makes squares fit which are this share of what the ring holds."""
    return 1.0 if square_share < 1 else 2.0 ** (math.ceil(-math.log2(square_share) / 2) - 1)


def with_stream_scale(
    architecture: Architecture, weights: Mapping[str, Tensor], factor: float
) -> tuple[Architecture, dict[str, Tensor]]:
    """The same model, not folded yet, with a stream times this factor, a power of two.

    One with a LayerNorm stays as it is: their epsilon, which must shrink too, is no number of a model.
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
