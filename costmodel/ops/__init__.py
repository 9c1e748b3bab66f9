"""What a decoder-only language model computes, as typed operations with named dimensions.

An `OpGraph` is what a protocol prices and what an engine runs. Dimensions are in elements; nothing here knows a
protocol, a price or a number of bytes.

Shape conventions: activations are `rows x features` with one row per token; attention works on
`heads x queries x keys`, and the full square is counted although the mask is causal, because the engines compute it
in full (protocol `sigma` counts less). Rows and heads are those of all `sequences` together: rows token by token, all
first tokens before all second ones, and heads sequence by sequence.
"""

from costmodel.ops.attention import *
from costmodel.ops.layers import *
from costmodel.ops.op import *

OP_TYPES: tuple[type[Op], ...] = (
    TokenEmbedding, PositionEmbedding, LayerNorm, RmsNorm, FrozenNorm, Linear, PackHeads, Rotary, RepeatHeads,
    KeyValueCache, AttentionScores, Temperature, ScoreBound, Softmax, ShapedAttention, AttentionMix, Gelu, Relu,
    LeakyRelu, Square, Silu, Sigmoid, Tanh, Multiply, Scale, Add, ScaledAdd, TakeRows, TakeColumns, JoinRows,
    JoinColumns, VocabProjection,
)  # fmt: skip
