"""Causal attention that also returns the Shannon entropy of every row, without holding a T x T matrix on the CPU.

With scores s_ij = scale * q_i . k_j, weights a = softmax(s) over j <= i and lse_i = logsumexp_j s_ij,

    E_i = -sum_j a_ij ln a_ij = lse_i - sum_j a_ij s_ij    and    sum_j a_ij s_ij = scale * q_i . (sum_j a_ij k_j),

so one attention pass over the values [v | k] yields output and entropy. Its gradient,
dE_i/ds_ij = -a_ij (s_ij - sum_m a_im s_im), passes through the weights a alone: the paths through lse_i and through
s as a factor cancel. Detaching q and k wherever they are not scores therefore gives it exactly.

Everything is computed in fp32 (fp64 stays fp64): the difference cancels for large scores.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

LANES = 16  # fp32 numbers in an AVX-512 register: the CPU kernel is no slower with 16 features than with 8


class Attended(NamedTuple):
    """output: batch x heads x T x head_dim. entropy: batch x heads x T, in nats, row i between 0 and ln i."""

    output: Tensor
    entropy: Tensor


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Attended:
    """Causal softmax attention and the entropy of its rows; both carry gradients.

    queries, keys, values: batch x heads x T x head_dim; the scores are q . k / sqrt(head_dim).
    """
    attend = _flash if queries.device.type == "cpu" else attention_reference
    dtype = torch.promote_types(values.dtype, torch.float32)
    output, entropy = attend(queries.to(dtype), keys.to(dtype), values.to(dtype))
    return Attended(output.to(values.dtype), entropy)


def _flash(queries: Tensor, keys: Tensor, values: Tensor) -> Attended:
    """The CPU's flash kernel on [v | k]; queries and keys are padded with zeros, as it wants one width for all."""
    head_dim = queries.shape[-1]
    scale = 1 / math.sqrt(head_dim)
    padding = max(head_dim, LANES - head_dim)
    mixed, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        functional.pad(queries, (0, padding)),
        functional.pad(keys, (0, padding)),
        functional.pad(torch.cat((values, keys.detach()), dim=-1), (0, padding - head_dim)),
        is_causal=True,
        scale=scale,
    )
    output, mean_keys = mixed[..., :head_dim], mixed[..., head_dim : 2 * head_dim]
    entropy = lse.detach() - scale * (queries.detach() * mean_keys).sum(dim=-1)
    return Attended(output, _bounded(entropy))


def attention_reference(queries: Tensor, keys: Tensor, values: Tensor) -> Attended:
    """The same by the textbook, over the whole T x T matrix of scores; what the fast path is tested against.

    A weight that underflows to 0 adds 0 to the entropy and to its gradient.
    """
    length, head_dim = queries.shape[-2:]
    mask = torch.ones(length, length, dtype=torch.bool, device=queries.device).tril()
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(head_dim)
    scores = scores.masked_fill(~mask, -math.inf)
    log_weights = functional.log_softmax(scores, dim=-1).masked_fill(~mask, 0.0)
    weights = log_weights.exp() * mask
    entropy = -(weights * log_weights).sum(dim=-1)
    return Attended(weights @ values, _bounded(entropy))


def row_bounds(length: int, device: torch.device | None = None) -> Tensor:
    """Largest entropy of each of `length` causal rows, in nats: row i attends to i keys, so ln i."""
    return torch.arange(1, length + 1, device=device, dtype=torch.float64).log()


def _bounded(entropy: Tensor) -> Tensor:
    """Rounding can leave [0, ln i] by an ulp or so; the bound keeps the gradient of every row inside."""
    upper = row_bounds(entropy.shape[-1], entropy.device).to(entropy.dtype)
    return torch.minimum(entropy.clamp(min=0.0), upper)
