"""Causal attention with entropy as fused Triton kernels, forward and backward, for CUDA.

The online softmax of flash attention (Dao et al. 2022, arXiv 2205.14135, algorithm 1) accumulates for every row the
largest score m so far and the sum l of e^(s_j - m). Here it also accumulates w, the sum of e^(s_j - m) (s_j - m), so
that at the end

    lse = m + ln l    and    E = ln l - w / l,

without cancellation. When the maximum rises from m to m', l becomes l c and w becomes (w + (m - m') l) c, with c = e^(m
- m'). The gradient of the scores is a_ij (dO_i . v_j - dO_i . O_i - dE_i (ln a_ij + E_i)), with a_ij computed again
from lse.

Inside the kernels, scores and w are in units of log2. Inputs are fp32, bf16 or fp16; sums, lse and entropy are fp32.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# Kernels are in Triton's language, whose types are not Python's.

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from costmodel.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 128
MIN_DOT_SIZE = 16  # of each dimension in a product of tiles
MAX_BLOCK = 64  # rows of a tile; Triton compiles 128 for minutes
TILE_BYTES = 8192  # for at most 66 KiB of shared memory per multiprocessor, which has 99 KiB on an RTX 3090
# a * b + c in one instruction, which a later Triton may not do by default. Two stages: forward and backward at T=1,024
# take 2.1 ms on an H200, and 2.4 with three.
OPTIONS = {"enable_fp_fusion": True, "num_stages": 2}
HIDDEN = tl.constexpr(-1e30)  # score of a later token; finite, because 0 * inf is NaN
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def attend(queries: Tensor, keys: Tensor, values: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return causal attention and the entropy of its rows in nats (fp32); both have gradients.

    queries, keys, values and the output are batch x heads x T x head_dim. Queries and keys are cast to the type of the
    values, which the output has too. The entropy is batch x heads x T. temperature: heads x T, positive, or None for 1;
    row i of head h of the scores, q . k / sqrt(head_dim), is divided by entry h, i.

    Raises UserError for head_dim above 128, or values of a type other than fp32, bf16 and fp16.
    """
    if values.shape[-1] > MAX_HEAD_DIM or values.dtype not in DTYPES:
        raise UserError(
            f"attention on CUDA takes heads of at most {MAX_HEAD_DIM} features in float32, bfloat16 or float16, but "
            f"got head_dim={values.shape[-1]}, {values.dtype}; use more heads, or another type."
        )
    if temperature is None:
        temperature = values.new_ones(values.shape[1:3], dtype=torch.float32)
    parts = (part.to(values.dtype) for part in (queries, keys, values))
    output, entropy, _ = torch.ops.nas.causal_attention(*parts, temperature.float())
    return output, entropy


@torch.library.custom_op("nas::causal_attention", mutates_args=())
def _attended(queries: Tensor, keys: Tensor, values: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, entropy and lse; compiled code calls this as one operator."""
    queries, keys, values = (_featurewise(part) for part in (queries, keys, values))
    output, entropy, lse = _results(queries)
    parts = (queries, keys, values, output)
    _forward[_grid(queries)](
        *parts, temperature.contiguous(), lse, entropy, *_strides(*parts), *_sizes(queries), **OPTIONS
    )
    return output, entropy, lse


@_attended.register_fake
def _results_like(queries, keys, values, temperature):
    return _results(_featurewise(queries))


@torch.library.custom_op("nas::causal_attention_backward", mutates_args=())
def _gradients(
    queries: Tensor, keys: Tensor, values: Tensor, temperature: Tensor, output: Tensor, entropy: Tensor, lse: Tensor,
    output_grad: Tensor, entropy_grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of queries, keys, values and, for each batch, head and row, minus the log temperature."""
    queries, keys, values, dout = (_featurewise(part) for part in (queries, keys, values, output_grad))
    temperature, dent = temperature.contiguous(), entropy_grad.contiguous()
    dq, dk, dv, heat, offset = (torch.empty_like(part) for part in (queries, keys, values, lse, lse))
    parts, rows = (queries, keys, values, dout), (temperature, lse, offset, dent)
    strides, sizes, grid = _strides(*parts), _sizes(queries), _grid(queries)
    _backward_queries[grid](
        *parts, *rows, output, entropy, dq, heat, *strides, *_strides(output, dq), *sizes, **OPTIONS
    )
    _backward_keys[grid](*parts, *rows, dk, dv, *strides, *_strides(dk, dv), *sizes, **OPTIONS)
    return dq, dk, dv, heat


@_gradients.register_fake
def _gradients_like(queries, keys, values, temperature, output, entropy, lse, output_grad, entropy_grad):
    return *(torch.empty_like(_featurewise(part)) for part in (queries, keys, values)), torch.empty_like(lse)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, output_grad: Tensor, entropy_grad: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    *parts, temperature, output, entropy, lse = ctx.saved_tensors
    *grads, heat = torch.ops.nas.causal_attention_backward(
        *parts, temperature, output, entropy, lse, output_grad, entropy_grad
    )
    return *grads, -heat.sum(dim=0) / temperature


_attended.register_autograd(_backward, setup_context=_keep)


@triton.jit
def _forward(
    queries, keys, values, output, temperature, lse, entropy, q_strides, k_strides, v_strides, o_strides,
    num_heads, length, head_dim, scale, block: tl.constexpr, padded_dim: tl.constexpr,
):  # fmt: skip
    first, which = tl.program_id(1) * block, tl.program_id(0)
    head, rows = which % num_heads, first + tl.arange(0, block)
    q = _tile(queries, q_strides, which, num_heads, rows, length, head_dim, padded_dim)
    factor = scale * LOG2_E / _row_values(temperature, head, rows, length, 1.0)
    mixed = tl.zeros([block, padded_dim], tl.float32)
    largest = tl.zeros([block], tl.float32) + HIDDEN
    total = tl.zeros([block], tl.float32)
    weighted = tl.zeros([block], tl.float32)
    for start in range(0, first + block, block):
        columns = start + tl.arange(0, block)
        k = _tile(keys, k_strides, which, num_heads, columns, length, head_dim, padded_dim)
        v = _tile(values, v_strides, which, num_heads, columns, length, head_dim, padded_dim)
        scores = _scores(q, k, factor, rows, columns)
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        centred, shrink = scores - higher[:, None], tl.exp2(largest - higher)
        weights = tl.exp2(centred)
        weighted = (weighted + (largest - higher) * total) * shrink + tl.sum(weights * centred, axis=1)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        largest = higher
    _store(output, o_strides, which, num_heads, rows, length, head_dim, mixed / total[:, None])
    log_total = tl.log2(total)
    _store_rows(lse, which, rows, length, (largest + log_total) * LN_2)
    _store_rows(entropy, which, rows, length, (log_total - weighted / total) * LN_2)


@triton.jit
def _backward_queries(
    queries, keys, values, output_grad, temperature, lse, offset, entropy_grad, output, entropy, dq, heat,
    q_strides, k_strides, v_strides, o_strides, output_strides, dq_strides,
    num_heads, length, head_dim, scale, block: tl.constexpr, padded_dim: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of queries of one head and, as `heat`, those of minus the log temperatures.

    Also store dO_i . O_i + dE_i E_i in `offset`, which the gradients of keys and values need.
    """
    first, which = tl.program_id(1) * block, tl.program_id(0)
    head, rows = which % num_heads, first + tl.arange(0, block)
    q = _tile(queries, q_strides, which, num_heads, rows, length, head_dim, padded_dim)
    dout = _tile(output_grad, o_strides, which, num_heads, rows, length, head_dim, padded_dim)
    mixed = _tile(output, output_strides, which, num_heads, rows, length, head_dim, padded_dim)
    dent = _row_values(entropy_grad, which, rows, length, 0.0)
    row_lse = _row_values(lse, which, rows, length, 0.0)
    row_offset = tl.sum(dout.to(tl.float32) * mixed.to(tl.float32), axis=1)
    row_offset += dent * _row_values(entropy, which, rows, length, 0.0)
    _store_rows(offset, which, rows, length, row_offset)
    scaled = scale / _row_values(temperature, head, rows, length, 1.0)
    row_heat, total = tl.zeros([block], tl.float32), tl.zeros([block, padded_dim], tl.float32)
    for start in range(0, first + block, block):
        columns = start + tl.arange(0, block)
        k = _tile(keys, k_strides, which, num_heads, columns, length, head_dim, padded_dim)
        v = _tile(values, v_strides, which, num_heads, columns, length, head_dim, padded_dim)
        log_weights = _scores(q, k, scaled * LOG2_E, rows, columns) * LN_2 - row_lse[:, None]
        dscores = _score_gradient(log_weights, _dot(dout, v), row_offset, dent)
        total = tl.dot(dscores.to(k.dtype), k, total, input_precision="ieee")
        row_heat += tl.sum(dscores * log_weights, axis=1)
    _store(dq, dq_strides, which, num_heads, rows, length, head_dim, total * scaled[:, None])
    _store_rows(heat, which, rows, length, row_heat)


@triton.jit
def _backward_keys(
    queries, keys, values, output_grad, temperature, lse, offset, entropy_grad, dk, dv,
    q_strides, k_strides, v_strides, o_strides, dk_strides, dv_strides,
    num_heads, length, head_dim, scale, block: tl.constexpr, padded_dim: tl.constexpr,
):  # fmt: skip
    first, which = tl.program_id(1) * block, tl.program_id(0)
    head, columns = which % num_heads, first + tl.arange(0, block)
    k = _tile(keys, k_strides, which, num_heads, columns, length, head_dim, padded_dim)
    v = _tile(values, v_strides, which, num_heads, columns, length, head_dim, padded_dim)
    dkeys = tl.zeros([block, padded_dim], tl.float32)
    dvalues = tl.zeros([block, padded_dim], tl.float32)
    for start in range(first, length, block):
        rows = start + tl.arange(0, block)
        q = _tile(queries, q_strides, which, num_heads, rows, length, head_dim, padded_dim)
        dout = _tile(output_grad, o_strides, which, num_heads, rows, length, head_dim, padded_dim)
        dent = _row_values(entropy_grad, which, rows, length, 0.0)
        row_lse = _row_values(lse, which, rows, length, 0.0)
        row_offset = _row_values(offset, which, rows, length, 0.0)
        scaled = scale / _row_values(temperature, head, rows, length, 1.0)
        log_weights = _scores(q, k, scaled * LOG2_E, rows, columns) * LN_2 - row_lse[:, None]
        dscores = _score_gradient(log_weights, _dot(dout, v), row_offset, dent) * scaled[:, None]
        weights = tl.exp2(log_weights * LOG2_E)
        dvalues = tl.dot(tl.trans(weights).to(dout.dtype), dout, dvalues, input_precision="ieee")
        dkeys = tl.dot(tl.trans(dscores).to(q.dtype), q, dkeys, input_precision="ieee")
    _store(dk, dk_strides, which, num_heads, columns, length, head_dim, dkeys)
    _store(dv, dv_strides, which, num_heads, columns, length, head_dim, dvalues)


@triton.jit
def _dot(a, b):
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def _scores(q, k, factor, rows, columns):
    """Return scores, rows x columns, in units of log2. factor: log2(e) / (t sqrt(head_dim)) of every row."""
    return tl.where(rows[:, None] >= columns[None, :], _dot(q, k) * factor[:, None], HIDDEN)


@triton.jit
def _score_gradient(log_weights, dweights, row_offset, dent):
    weights = tl.exp2(log_weights * LOG2_E)
    return weights * (dweights - row_offset[:, None] - dent[:, None] * log_weights)


@triton.jit
def _tile(part, strides, which, num_heads, rows, length, head_dim, padded_dim: tl.constexpr):
    """Load rows x features, 0 outside. which: number of the head, counted over all sequences of the batch."""
    features = tl.arange(0, padded_dim)
    inside = (rows[:, None] < length) & (features[None, :] < head_dim)
    base = part + (which // num_heads).to(tl.int64) * strides[0] + (which % num_heads).to(tl.int64) * strides[1]
    return tl.load(base + rows[:, None] * strides[2] + features[None, :], mask=inside, other=0.0)


@triton.jit
def _store(part, strides, which, num_heads, rows, length, head_dim, tile):
    features = tl.arange(0, tile.shape[1])
    inside = (rows[:, None] < length) & (features[None, :] < head_dim)
    base = part + (which // num_heads).to(tl.int64) * strides[0] + (which % num_heads).to(tl.int64) * strides[1]
    tl.store(base + rows[:, None] * strides[2] + features[None, :], tile.to(part.dtype.element_ty), mask=inside)


@triton.jit
def _row_values(part, which, rows, length, outside):
    return tl.load(part + which.to(tl.int64) * length + rows, mask=rows < length, other=outside)


@triton.jit
def _store_rows(part, which, rows, length, row_values):
    tl.store(part + which.to(tl.int64) * length + rows, row_values, mask=rows < length)


def _featurewise(heads: Tensor) -> Tensor:
    """Make the features of a head contiguous, as the kernels expect."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _results(queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate output, entropy and lse."""
    rows = queries.new_empty(queries.shape[:3], dtype=torch.float32)
    return torch.empty_like(queries), rows, torch.empty_like(rows)


def _strides(*parts: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(part.stride()[:3] for part in parts)


def _sizes(queries: Tensor) -> tuple[int, int, int, float, int, int]:
    _, num_heads, length, head_dim = queries.shape
    return num_heads, length, head_dim, 1 / head_dim**0.5, *_tile_shape(head_dim, queries.element_size())


def _grid(queries: Tensor) -> tuple[int, int]:
    batch, num_heads, length, head_dim = queries.shape
    block, _ = _tile_shape(head_dim, queries.element_size())
    return batch * num_heads, triton.cdiv(length, block)  # CUDA limits the second to 65,535


def _tile_shape(head_dim: int, num_bytes: int) -> tuple[int, int]:
    padded_dim = max(MIN_DOT_SIZE, triton.next_power_of_2(head_dim))
    return min(MAX_BLOCK, TILE_BYTES // (padded_dim * num_bytes)), padded_dim
