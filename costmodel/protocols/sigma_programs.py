"""The steps of each op under protocol `sigma`: as SIGMA's code runs them or, if it has no such op, as assumed here.

The code runs the blocks of GPT-2, GPT-Neo, BERT and Llama 2. For other ops, these are assumptions:

- The embedding is a product of one-hot tokens, shared by the client, with a secret table; the vocabulary projection is
  a product of hidden states with a secret table.
- Square, leaky ReLU, scaled additions, frozen norms, norms of heads, temperatures, shaped attention, public factors,
  and scores times a factor that is not a power of two consist of the code's products, comparisons and truncations.
- Sigmoid, tanh, tokens that are looked up, the piecewise GELU, and softmax in other forms than exact and bounded have
  no formula.
- Bounded softmax is the code's softmax without the tree for the maximum. The table of inverses keeps 6 fraction bits of
  a row's sum, which can be less than 1 without the maximum, so bounds must lie close to the maxima.
- With cached keys, when there are fewer queries than keys, the steps are the same, and all scores are computed.

Weights are secret, so products with them are products of two secrets. As under other protocols, sharing them is not
counted, but their masks are in the keys. Both parties know masked numbers, so sums and products with public integers
are local. A causal softmax and its scores leave out masked positions. `peer->sync`, 2 bytes a run, is in no op.

Source: as for `sigma_primitives.py`; files of `fss`, and `backend/sigma.h` for the order of truncations.
"""

from collections.abc import Callable
from math import inf, log2
from typing import Any, TypeAlias

from costmodel import ops
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Op
from costmodel.protocols.primitives import NOTHING, Comm, refuse_public, total_comm
from costmodel.protocols.sigma_primitives import (
    SigmaSetting,
    gated,
    inverse_root,
    key,
    looked_up,
    matrix_product,
    multiplied,
    positive_part,
    squared,
    truncated,
    truncated_small,
)

OTHERS = "choose protocol semi2k, aby3 or cheetah"
EXPONENT_BITS = 16  # gpu_nexp.cu: bits of a score's distance to the maximum, 12 of them after the point
TABLE_BITS = 8  # of the index of each of the two tables that make an exponential
SUM_SHIFT = 6  # gpu_inverse.cu: number of fraction bits cut off a row's sum before its inverse is looked up
INVERSE_BITS = (8, 16)  # gpu_inverse.cu and gpu_lut.h: least and most bits of the index of the table of inverses
SUM_FRACTION_BITS = 12  # the only number of fraction bits that gpu_inverse.cu supports
GELU_TABLE_BITS, SILU_TABLE_BITS = 8, 10  # sigma.h

Formula: TypeAlias = Callable[[Any, SigmaSetting], Comm]


def comm(op: Op, setting: SigmaSetting) -> Comm:
    """Return the communication and keys of one op; a UserError is raised for public weights, or without a formula."""
    if op.is_local:
        return NOTHING
    refuse_public(op, "sigma")
    if type(op) not in PROGRAMS:
        raise _unpriced(op, "its code has no table for it")
    return PROGRAMS[type(op)](op, setting)


def _unpriced(op: Op, why: str) -> UnpricedOpError:
    return UnpricedOpError(f"protocol sigma has no formula for {type(op).__name__}: {why}; {OTHERS}.")


def _cut(product: Comm, elements: int, setting: SigmaSetting) -> Comm:
    return total_comm([product, truncated(elements, setting.ring_bits, setting.fraction_bits)])


def _matmul(m: int, k: int, n: int, setting: SigmaSetting) -> Comm:
    return _cut(matrix_product(m * k + k * n, m * n, setting.ring_bits), m * n, setting)


def _embed(op: ops.TokenEmbedding, setting: SigmaSetting) -> Comm:
    if op.encoding != "one-hot":
        raise _unpriced(op, "with `encoding` lookup, secret tokens are compared with the vocabulary")
    return _matmul(op.tokens, op.vocab, op.features, setting)


def _by_factors(elements: int, factors: int, setting: SigmaSetting) -> Comm:
    """Multiply by secret factors, each used for several elements. Source: gpu_window.cu, windowMul."""
    cut = truncated_small(elements, setting.fraction_bits, setting.ring_bits)
    return total_comm([multiplied(elements, factors, setting.ring_bits), cut])


def _scaled(elements: int, factor: float, setting: SigmaSetting) -> Comm:
    """Multiply by a public factor: free for 2^n with n >= 0, otherwise one truncation, which alone does 2^-n."""
    shift = -log2(abs(factor))
    if shift <= 0 and shift.is_integer():
        return NOTHING
    is_cut = shift.is_integer() and shift < setting.ring_bits
    return truncated(elements, setting.ring_bits, int(shift) if is_cut else setting.fraction_bits)


def _norm(op: ops.LayerNorm | ops.RmsNorm, setting: SigmaSetting) -> Comm:
    """Divide by the root mean square, for LayerNorm without the mean, then multiply by a gain; a bias is free.

    Source: gpu_layernorm.cu.
    """
    elements, is_centred = op.rows * op.features, isinstance(op, ops.LayerNorm)
    roots, width = (op.num_roots, op.features // op.groups) if isinstance(op, ops.RmsNorm) else (op.rows, op.features)
    parts = [_scaled(op.rows, 1 / op.features, setting)] if is_centred else []
    parts += [squared(elements, setting.ring_bits, roots), inverse_root(roots, setting.ring_bits)]
    parts += [_by_factors(elements, roots, setting)]
    return total_comm([*parts, *([_by_factors(elements, width, setting)] if op.affine else [])])


def _frozen_norm(op: ops.FrozenNorm, setting: SigmaSetting) -> Comm:
    means = [_scaled(op.rows, 1 / op.features, setting)] if op.centred else []
    return total_comm([*means, _by_factors(op.rows * op.features, op.features, setting)])


def _rotary(op: ops.Rotary, setting: SigmaSetting) -> Comm:
    """Rotate queries, then keys, by public angles with 3 fraction bits fewer. Source: gpu_mha.cu, gpuRotEmb."""
    head_elements = op.rows * op.rotary_dim
    heads = (op.heads, op.key_heads or op.heads)
    return total_comm(
        truncated_small(head_elements * some, setting.fraction_bits - 3, setting.ring_bits) for some in heads
    )


def _num_scores(op: ops.OnScores, *, causal: bool = True) -> int:
    """Count the computed scores: for a whole prompt, only those that the mask does not hide."""
    per_head = op.queries * (op.queries + 1) // 2 if causal and op.queries == op.keys else op.queries * op.keys
    return op.heads * per_head


def _scores(op: ops.AttentionScores, setting: SigmaSetting) -> Comm:
    """Multiply queries by keys; a factor that is no power of two costs a second truncation. Source: gpu_mha.cu."""
    elements = _num_scores(op, causal=op.causal)
    factor = 1 if not op.scaled else op.head_dim**-0.5 if op.factor is None else op.factor
    shift = -log2(factor) if factor > 0 else inf
    is_cut = shift.is_integer() and 0 < setting.fraction_bits + shift < setting.ring_bits
    cut = truncated(elements, setting.ring_bits, setting.fraction_bits + (int(shift) if is_cut else 0))
    rest = [] if is_cut else [truncated(elements, setting.ring_bits, setting.fraction_bits)]
    operands = op.heads * op.head_dim * (op.queries + op.keys)
    return total_comm([matrix_product(operands, elements, setting.ring_bits), cut, *rest])


def _mix(op: ops.AttentionMix, setting: SigmaSetting) -> Comm:
    outputs = op.heads * op.queries * op.head_dim
    operands = op.heads * op.keys * (op.queries + op.head_dim)
    return _cut(matrix_product(operands, outputs, setting.ring_bits), outputs, setting)


def _on_scores(op: ops.OnScores, setting: SigmaSetting) -> Comm:
    return truncated(_num_scores(op), setting.ring_bits, setting.fraction_bits)


def _softmax(op: ops.Softmax, setting: SigmaSetting) -> Comm:
    """Take exponentials, sum each row, look up the inverse of the sum and multiply. Source: gpu_softmax.cu.

    A UserError is raised where the code supports no such form, fraction or length.
    """
    if op.form not in ("exact", "bounded"):
        raise _unpriced(op, f"with `form` {op.form}, sums are beyond its table of inverses")
    if setting.fraction_bits != SUM_FRACTION_BITS:
        raise UserError(
            f"`fraction_bits` must be {SUM_FRACTION_BITS} for softmax under protocol sigma, whose table of inverses is "
            f"made for it, but got {setting.fraction_bits}."
        )
    rows, keys = op.heads * op.queries, op.keys
    least, most = (2 ** (bound + SUM_SHIFT - SUM_FRACTION_BITS) for bound in INVERSE_BITS)
    if keys & (keys - 1) or not least <= keys <= most:
        padded = min(most, max(least, 1 << (keys - 1).bit_length()))
        cached = "its code runs whole prompts, without cached keys or blocks of queries"
        raise UserError(
            f"protocol sigma runs softmax over {least} to {most} keys, a power of two, but got {keys}; "
            f"{f'pad the prompt to {padded} tokens' if op.queries == keys else cached}."
        )
    levels, score_bits = (keys - 1).bit_length(), setting.ring_bits - setting.fraction_bits
    tree = []
    if op.form == "exact":  # the maximum, by a tree, with two bits more than scores have
        compared = [_num_compared(op, level) for level in range(1, levels + 1)]
        tree = [key(4), *(positive_part(elements, score_bits + 1, score_bits + 2) for elements in compared)]
    inverse_bits = setting.fraction_bits + levels - SUM_SHIFT
    return total_comm(
        [
            *tree,
            *_exponentials(op, setting),
            truncated_small(rows, SUM_SHIFT, inverse_bits, word_bits=16),
            looked_up(rows, inverse_bits, setting.ring_bits),
            _by_factors(_num_scores(op, causal=op.causal), rows, setting),
        ]
    )


def _num_compared(op: ops.Softmax, level: int) -> int:
    """Count the pairs at a level of the tree. Source: gpu_maxpool.cu, keygenMaxpoolLogHelper."""
    if op.causal and op.queries == op.keys:
        return op.heads * ((op.keys**2 >> (level + 1)) + op.keys // 2)
    return op.heads * op.queries * (op.keys >> level)


def _exponentials(op: ops.Softmax, setting: SigmaSetting) -> list[Comm]:
    """Compute exp(-x) by tables for the upper and lower half of x's clipped bits. Source: gpu_nexp.cu, gpuNExp."""
    elements = _num_scores(op, causal=op.causal)
    ring_bits, score_bits = setting.ring_bits, setting.ring_bits - setting.fraction_bits
    return [
        positive_part(elements, score_bits + 2, EXPONENT_BITS, word_bits=16),
        looked_up(elements, TABLE_BITS, ring_bits),
        truncated_small(elements, TABLE_BITS, EXPONENT_BITS - TABLE_BITS, word_bits=8),
        looked_up(elements, TABLE_BITS, ring_bits),
        _by_factors(elements, elements, setting),
    ]


def _gelu(op: ops.Gelu, setting: SigmaSetting) -> Comm:
    if op.form not in ("tanh", "exact"):
        raise _unpriced(op, f"with `form` {op.form}, it has a table of its own that the code lacks")
    return gated(op.rows * op.features, setting.ring_bits, setting.fraction_bits, GELU_TABLE_BITS)


def _by_element(steps: Callable[[int, SigmaSetting], Comm]) -> Formula:
    """Return the formula that applies the same steps to all of an op's rows x features elements."""
    return lambda op, setting: steps(op.rows * op.features, setting)


def _relu(elements: int, setting: SigmaSetting) -> Comm:
    return positive_part(elements, setting.ring_bits, setting.ring_bits)


def _by_scalar(elements: int, setting: SigmaSetting) -> Comm:
    return _by_factors(elements, 1, setting)


# op type -> its steps; a type that is neither listed nor local is an error
PROGRAMS: dict[type, Formula] = {
    ops.TokenEmbedding: _embed,
    ops.PositionEmbedding: lambda op, setting: NOTHING,
    ops.LayerNorm: _norm,
    ops.RmsNorm: _norm,
    ops.FrozenNorm: _frozen_norm,
    ops.Linear: lambda op, setting: _matmul(op.rows, op.in_features, op.out_features, setting),
    ops.Rotary: _rotary,
    ops.AttentionScores: _scores,
    ops.Temperature: _on_scores,
    ops.Softmax: _softmax,
    ops.ShapedAttention: _on_scores,
    ops.AttentionMix: _mix,
    ops.Gelu: _gelu,
    ops.Relu: _by_element(_relu),
    ops.LeakyRelu: _by_element(lambda count, setting: total_comm([_relu(count, setting), _by_scalar(count, setting)])),
    ops.Square: _by_element(lambda count, setting: _cut(squared(count, setting.ring_bits), count, setting)),
    ops.Silu: _by_element(
        lambda count, setting: gated(count, setting.ring_bits, setting.fraction_bits, SILU_TABLE_BITS)
    ),
    ops.Multiply: _by_element(lambda count, setting: _cut(multiplied(count, count, setting.ring_bits), count, setting)),
    ops.Scale: lambda op, setting: _scaled(op.rows * op.features, op.factor, setting),
    ops.ScaledAdd: _by_element(lambda count, setting: total_comm([_by_scalar(count, setting)] * 2)),
    ops.VocabProjection: lambda op, setting: _matmul(op.rows, op.features, op.vocab, setting),
}
