"""The operations of a decoder-only language model, typed and with named dimensions.

An `OpGraph` is what a protocol prices and an engine runs. Dimensions are numbers of elements; no op knows a protocol, a
cost or a number of bytes. An op marked "(local)" needs no communication under any protocol.

Shape conventions: activations are `rows x features` with one row per token; scores are `heads x queries x keys`. Scores
that a causal mask hides are counted too, because the engines compute them (protocol `sigma` counts fewer). In a
batch, rows and heads are those of all `sequences` together: rows are ordered token by token (all first tokens, then all
second ones), heads sequence by sequence.
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
