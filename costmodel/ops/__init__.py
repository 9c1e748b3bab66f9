"""What a decoder-only language model computes, as typed operations with named dimensions.

An `OpGraph` is what a protocol prices and what an engine runs. Dimensions are in elements; nothing here knows a
protocol, a price or a number of bytes.

Shape conventions: activations are `rows x features` with one row per token; attention works on
`heads x queries x keys`, and the full square is counted although the mask is causal, because secret-shared
engines compute it in full. Rows and heads are those of all `sequences` together: rows token by token, all first tokens
before all second ones, and heads sequence by sequence.
"""

from costmodel.ops.attention import AttentionMix as AttentionMix
from costmodel.ops.attention import AttentionScores as AttentionScores
from costmodel.ops.attention import KeyValueCache as KeyValueCache
from costmodel.ops.attention import PackHeads as PackHeads
from costmodel.ops.attention import RepeatHeads as RepeatHeads
from costmodel.ops.attention import Rotary as Rotary
from costmodel.ops.attention import ScoreBound as ScoreBound
from costmodel.ops.attention import ShapedAttention as ShapedAttention
from costmodel.ops.attention import Softmax as Softmax
from costmodel.ops.attention import Temperature as Temperature
from costmodel.ops.graph import USUAL as USUAL
from costmodel.ops.graph import Input as Input
from costmodel.ops.graph import Node as Node
from costmodel.ops.graph import OpGraph as OpGraph
from costmodel.ops.graph import output_shapes as output_shapes
from costmodel.ops.graph import shape as shape
from costmodel.ops.layers import Add as Add
from costmodel.ops.layers import FrozenNorm as FrozenNorm
from costmodel.ops.layers import Gelu as Gelu
from costmodel.ops.layers import JoinColumns as JoinColumns
from costmodel.ops.layers import JoinRows as JoinRows
from costmodel.ops.layers import LayerNorm as LayerNorm
from costmodel.ops.layers import LeakyRelu as LeakyRelu
from costmodel.ops.layers import Linear as Linear
from costmodel.ops.layers import Multiply as Multiply
from costmodel.ops.layers import PositionEmbedding as PositionEmbedding
from costmodel.ops.layers import Relu as Relu
from costmodel.ops.layers import RmsNorm as RmsNorm
from costmodel.ops.layers import Scale as Scale
from costmodel.ops.layers import ScaledAdd as ScaledAdd
from costmodel.ops.layers import Sigmoid as Sigmoid
from costmodel.ops.layers import Silu as Silu
from costmodel.ops.layers import Square as Square
from costmodel.ops.layers import TakeColumns as TakeColumns
from costmodel.ops.layers import TakeRows as TakeRows
from costmodel.ops.layers import Tanh as Tanh
from costmodel.ops.layers import TokenEmbedding as TokenEmbedding
from costmodel.ops.layers import VocabProjection as VocabProjection
from costmodel.ops.op import RMSNORM_EPSILON as RMSNORM_EPSILON
from costmodel.ops.op import ROTARY_BASE as ROTARY_BASE
from costmodel.ops.op import Encoding as Encoding
from costmodel.ops.op import GeluForm as GeluForm
from costmodel.ops.op import LayerId as LayerId
from costmodel.ops.op import OnRows as OnRows
from costmodel.ops.op import OnScores as OnScores
from costmodel.ops.op import Op as Op
from costmodel.ops.op import Shape as Shape
from costmodel.ops.op import SoftmaxForm as SoftmaxForm

OP_TYPES: tuple[type[Op], ...] = (
    TokenEmbedding, PositionEmbedding, LayerNorm, RmsNorm, FrozenNorm, Linear, PackHeads, Rotary, RepeatHeads,
    KeyValueCache, AttentionScores, Temperature, ScoreBound, Softmax, ShapedAttention, AttentionMix, Gelu, Relu,
    LeakyRelu, Square, Silu, Sigmoid, Tanh, Multiply, Scale, Add, ScaledAdd, TakeRows, TakeColumns, JoinRows,
    JoinColumns, VocabProjection,
)  # fmt: skip
