"""Causal attention by its definition, against which other implementations are tested; exports include this code."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Attended(NamedTuple):
    """Result of an attention.

    output: batch x heads x T x head_dim. entropy: of each row of weights, batch x heads x T, in nats, from 0 to ln i in
        row i = 1, 2, ...; None if not computed.
    """

    output: Tensor
    entropy: Tensor | None


def capped(numbers: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap) for numbers x, or the numbers themselves without a cap."""
    return numbers if cap is None else cap * torch.tanh(numbers / cap)


def row_bounds(length: int, device: torch.device | None = None) -> Tensor:
    """Return the largest entropy of each of `length` causal rows, in nats: ln i, as row i = 1, 2, ... sees i keys."""
    return torch.arange(1, length + 1, device=device, dtype=torch.float64).log()


def attention_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    temperature: Tensor | None = None,
    with_entropy: bool = True,
    cap: float | None = None,
) -> Attended:
    """Return causal softmax attention by the whole T x T matrix of scores, in fp32, or in fp64 for fp64 values.

    queries, keys, values: batch x heads x T x head_dim. temperature: heads x T; divides the rows of the scores; None
        for 1. cap: scores x become cap * tanh(x / cap); None for no cap. with_entropy: ignored; the entropy is always
        returned. A weight that underflows to 0 adds 0 to the entropy and to its gradient.
    """
    queries, keys, values = upcast(queries, keys, values)
    scores, mask = causal_scores(queries, keys, temperature, cap)
    log_weights = functional.log_softmax(scores.masked_fill(~mask, -math.inf), dim=-1).masked_fill(~mask, 0.0)
    weights = log_weights.exp() * mask
    return Attended(weights @ values, bounded(-(weights * log_weights).sum(dim=-1)))


def exact_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, temperature: Tensor | None = None, with_entropy: bool = True
) -> Attended:
    """Return causal attention: `attention_reference` or, without entropy, torch's own in the type of the values."""
    if with_entropy:
        return attention_reference(queries, keys, values, temperature=temperature)
    queries, keys = scale_by_temperature(queries, temperature).to(values.dtype), keys.to(values.dtype)
    return Attended(functional.scaled_dot_product_attention(queries, keys, values, is_causal=True), None)


def log_sums(queries: Tensor, keys: Tensor, temperature: Tensor | None, cap: float | None = None) -> Tensor:
    """Return the logarithm of the softmax's denominator for each row, batch x heads x T."""
    scores, mask = causal_scores(queries, keys, temperature, cap)
    return scores.masked_fill(~mask, -math.inf).logsumexp(dim=-1)


def causal_scores(
    queries: Tensor, keys: Tensor, temperature: Tensor | None, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the capped scores, batch x heads x queries x keys, and the mask of visible keys, queries x keys.

    The queries are those of the last tokens. temperature: heads x queries, or None for 1. cap: None for no cap.
    """
    length, total = queries.shape[-2], keys.shape[-2]
    mask = torch.ones(length, total, dtype=torch.bool, device=queries.device).tril(total - length)
    scores = scale_by_temperature(queries, temperature) @ keys.mT / math.sqrt(queries.shape[-1])
    return capped(scores, cap), mask


def scale_by_temperature(queries: Tensor, temperature: Tensor | None) -> Tensor:
    """Divide queries, and thereby scores, by the temperatures of their rows (None for 1); keep the queries' dtype."""
    if temperature is None:
        return queries
    return (queries * temperature.reciprocal().unsqueeze(-1)).to(queries.dtype)


def upcast(*parts: Tensor) -> tuple[Tensor, ...]:
    """Convert queries, keys and values (or fewer, values last) to fp32, or to fp64 if the values are fp64."""
    return tuple(part.to(torch.promote_types(parts[-1].dtype, torch.float32)) for part in parts)


def bounded(entropy: Tensor) -> Tensor:
    """Return entropies, ... x T, clamped to [0, ln i] in row i = 1, 2, ..., which rounding can leave by an ulp."""
    upper = row_bounds(entropy.shape[-1], entropy.device).to(entropy.dtype)
    return torch.minimum(entropy.clamp(min=0.0), upper)
