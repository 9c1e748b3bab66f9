"""Causal attention with entropy on the CPU by torch alone, forward and backward, one block of query rows at a time.

With scores s_ij = q_i . k_j / sqrt(head_dim) and weights a = softmax(s) over j <= i,

    E_i = ln l_i - sum_j e^(s_ij - m_i) (s_ij - m_i) / l_i    with m_i = max_j s_ij and l_i = sum_j e^(s_ij - m_i),
    dE_i/ds_ij = -a_ij (s_ij - sum_m a_im s_im) = -a_ij (ln a_ij + E_i).

Scores are centred on the maximum of their row, so that nothing cancels when they are large. Both passes work in
buffers of a fixed size that fit a core's second-level cache, so no T x T matrix is ever held; the backward pass
computes the weights again, as flash attention does (Dao et al. 2022, arXiv 2205.14135, algorithm 4).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

BLOCK_ROWS = 32  # the fastest of 32, 64, 128 and 256 for 1,024 tokens of 12 heads of 16 to 64 features, T = 128 to 1024
BUFFER_SIZE = (
    200_000  # scores in a buffer, or a single head's block; 50,000 to 800,000 are within a tenth of each other
)
HIDDEN = -1e30  # score of a masked token; finite, so that its weight of 0 times it is 0
LANES = 16  # fp32 numbers in an AVX-512 register: torch's flash kernel is no slower with 16 features than with 8


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output and row entropy in nats, unbounded by rounding; both carry gradients.

    queries, keys, values: batch x heads x T x head_dim, fp32 or fp64.
    """
    if 2 * queries.shape[-1] <= LANES:
        return _flash(queries, keys, values)
    output, entropy = _Blocked.apply(queries, keys, values)  # type: ignore[no-untyped-call]
    return output, entropy


def _flash(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One pass of torch's flash kernel over [v | k], at little cost where both fit a register.

    E_i = lse_i - sum_j a_ij s_ij, and the sum is scale * q_i . (sum_j a_ij k_j). The gradient passes through the
    weights a alone, as the paths through lse_i and through s as a factor cancel: hence what is detached. The kernel
    wants one width for all operands.
    """
    head_dim = queries.shape[-1]
    scale = 1 / math.sqrt(head_dim)
    mixed, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        functional.pad(queries, (0, LANES - head_dim)),
        functional.pad(keys, (0, LANES - head_dim)),
        functional.pad(torch.cat((values, keys.detach()), dim=-1), (0, LANES - 2 * head_dim)),
        is_causal=True,
        scale=scale,
    )
    output, mean_keys = mixed[..., :head_dim], mixed[..., head_dim : 2 * head_dim]
    return output, lse.detach() - scale * (queries.detach() * mean_keys).sum(dim=-1)


class _Block(NamedTuple):
    """Query rows `start` to `stop` of some heads; they see the keys before `stop`."""

    heads: slice
    start: int
    stop: int

    @property
    def rows(self) -> tuple[slice, slice]:
        return self.heads, slice(self.start, self.stop)

    @property
    def seen(self) -> tuple[slice, slice]:
        return self.heads, slice(self.stop)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads.stop - self.heads.start, self.stop - self.start, self.stop


def _blocks(num_heads: int, length: int) -> Iterator[_Block]:
    for start in range(0, length, BLOCK_ROWS):
        stop = min(length, start + BLOCK_ROWS)
        num_together = max(1, BUFFER_SIZE // ((stop - start) * stop))
        for first in range(0, num_heads, num_together):
            yield _Block(slice(first, min(num_heads, first + num_together)), start, stop)


class _Buffers:
    """Room for some blocks of scores, shaped as the block in hand wants it."""

    def __init__(self, like: Tensor, count: int) -> None:
        num_heads, length, _ = like.shape
        size = max(math.prod(block.shape) for block in _blocks(num_heads, length))
        self._rooms = like.new_empty(count, size)

    def shaped(self, block: _Block) -> list[Tensor]:
        return [room[: math.prod(block.shape)].view(block.shape) for room in self._rooms]


class _Blocked(torch.autograd.Function):
    """Output and entropy; inside, batch and heads are one dimension."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        batch, num_heads, length, head_dim = queries.shape
        q, k, v = (part.reshape(-1, length, head_dim) for part in (queries, keys, values))
        q, mask = q / math.sqrt(head_dim), _causal_mask(q)
        output, lse, entropy = torch.empty_like(q), q.new_empty(*q.shape[:2], 1), q.new_empty(*q.shape[:2], 1)
        buffers = _Buffers(q, 2)
        for block in _blocks(len(q), length):
            scores, weights = buffers.shaped(block)
            _score(block, q, k, mask, out=scores)
            largest = scores.amax(dim=-1, keepdim=True)
            torch.exp(scores.sub_(largest), out=weights)
            total = weights.sum(dim=-1, keepdim=True)
            log_total = total.log()
            lse[block.rows] = largest + log_total
            entropy[block.rows] = log_total - scores.mul_(weights).sum(dim=-1, keepdim=True) / total
            torch.div(torch.bmm(weights, v[block.seen]), total, out=output[block.rows])
        ctx.save_for_backward(queries, keys, values, output, lse, entropy)
        return output.view(queries.shape), entropy.view(batch, num_heads, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ds_ij = a_ij (dO_i . v_j - dO_i . O_i - dE_i (ln a_ij + E_i))."""
        queries, keys, values, output, lse, entropy = ctx.saved_tensors
        length, head_dim = queries.shape[-2:]
        q, k, v, dout = (part.reshape(-1, length, head_dim) for part in (queries, keys, values, output_grad))
        q, mask = q / math.sqrt(head_dim), _causal_mask(q)
        dent = entropy_grad.reshape(-1, length, 1)
        offset = (dout * output).sum(dim=-1, keepdim=True) + dent * entropy
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(q), torch.zeros_like(q)
        buffers = _Buffers(q, 3)
        for block in _blocks(len(q), length):
            log_weights, weights, dscores = buffers.shaped(block)
            _score(block, q, k, mask, out=log_weights)
            torch.exp(log_weights.sub_(lse[block.rows]), out=weights)
            dv[block.seen].baddbmm_(weights.mT, dout[block.rows])
            torch.bmm(dout[block.rows], v[block.seen].mT, out=dscores)
            dscores.addcmul_(log_weights, dent[block.rows], value=-1).sub_(offset[block.rows]).mul_(weights)
            torch.div(torch.bmm(dscores, k[block.seen]), math.sqrt(head_dim), out=dq[block.rows])
            dk[block.seen].baddbmm_(dscores.mT, q[block.rows])
        return dq.view(queries.shape), dk.view(queries.shape), dv.view(queries.shape)


def _score(block: _Block, queries: Tensor, keys: Tensor, mask: Tensor, *, out: Tensor) -> None:
    """The block's scores; those of masked tokens are `HIDDEN`."""
    torch.bmm(queries[block.rows], keys[block.seen].mT, out=out)
    num_rows = block.stop - block.start
    out[..., block.start :].masked_fill_(mask[:num_rows, :num_rows], HIDDEN)


def _causal_mask(like: Tensor) -> Tensor:
    """Where in the last columns of a block a key comes after the query."""
    size = min(BLOCK_ROWS, like.shape[1])
    return torch.ones(size, size, dtype=torch.bool, device=like.device).triu(1)
