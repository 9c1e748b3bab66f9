"""What a decoder-only language model computes, as typed operations with named dimensions.

An `OpGraph` is the single source of truth about a model: it is what a protocol prices and what an engine runs.
Dimensions are in elements; nothing here knows a protocol, a price or a number of bytes.

Shape conventions: activations are `rows x features` with one row per token; attention works on
`heads x queries x keys`, and the full square is counted although the mask is causal, because secret-shared
engines compute it in full. Rows and heads are those of all `sequences` together: rows token by token, all first tokens
before all second ones, and heads sequence by sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from costmodel.elementwise import Add as Add
from costmodel.elementwise import Gelu as Gelu
from costmodel.elementwise import GeluForm as GeluForm
from costmodel.elementwise import LeakyRelu as LeakyRelu
from costmodel.elementwise import Multiply as Multiply
from costmodel.elementwise import Relu as Relu
from costmodel.elementwise import Scale as Scale
from costmodel.elementwise import ScaledAdd as ScaledAdd
from costmodel.elementwise import Sigmoid as Sigmoid
from costmodel.elementwise import Silu as Silu
from costmodel.elementwise import Square as Square
from costmodel.elementwise import Tanh as Tanh
from costmodel.errors import UserError

LayerId: TypeAlias = int | Literal["embed", "head"]
Encoding = Literal["one-hot", "lookup"]
SoftmaxForm = Literal["exact", "2quad", "relu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEmbedding:
    """One-hot tokens (`tokens x vocab`) times the embedding table (`vocab x features`).

    encoding: `one-hot`, by the client in the clear; `lookup`, under the protocol, from tokens shared as integers.
    """

    tokens: int
    vocab: int
    features: int
    encoding: Encoding = "one-hot"


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionEmbedding:
    """Adds the learned positions of `rows` tokens (`rows x features`) that follow `past_len` others; local.

    The tokens of several `sequences` stand side by side: all first ones, then all second ones.
    """

    rows: int
    features: int
    past_len: int = 0
    sequences: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorm:
    """Normalises each row to zero mean and unit variance, then applies gain and bias unless they are folded away.

    bias: whether a norm with a gain has a bias.
    """

    rows: int
    features: int
    affine: bool = True
    bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class RmsNorm:
    """Divides each row by its root mean square, then applies a gain unless it is folded away.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4.
    """

    rows: int
    features: int
    affine: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenNorm:
    """A norm whose deviation is a constant: `gain * (x - mean(x)) + bias`, or `gain * x` if it is not centred.

    Linear, so folding leaves nothing of it; the gain has taken up the constant 1/sigma.

    Source: Baroni et al. 2025, "Transformers Don't Need LayerNorm at Inference Time", https://arxiv.org/abs/2507.02559.
    """

    rows: int
    features: int
    centred: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """`rows x in_features` times a weight of `in_features x out_features`, plus an optional bias."""

    rows: int
    in_features: int
    out_features: int
    bias: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PackHeads:
    """Lays queries, keys and values of separate linears side by side (local).

    query_features, key_features: of one token's queries, and of its keys as of its values.
    """

    rows: int
    query_features: int
    key_features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotates the first `rotary_dim` features of every query and key head by public angles, `past_len` tokens on.

    key_heads: heads of the keys, and of the values behind them, where there are fewer than of the queries.

    Local where products with public numbers are; in a fixed-point engine each costs a truncation.
    """

    rows: int
    heads: int
    rotary_dim: int
    past_len: int = 0
    key_heads: int | None = None
    sequences: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatHeads:
    """Copies each key and value head for all query heads that share it (local).

    Source: Ainslie et al. 2023, grouped-query attention, https://arxiv.org/abs/2305.13245, section 2.2.
    """

    rows: int
    heads: int
    key_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValueCache:
    """The keys and values of `past_len` tokens, an input of the graph, followed by those of `rows` new tokens (local).

    features: of the keys and values of one token together, or of the keys or the values alone; the last ones of what
        is read of a new token. With a `past_len` of 0 there is no input but that.
    """

    past_len: int
    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionScores:
    """Per head, `queries x head_dim` times `head_dim x keys`, with a public factor if `scaled`.

    factor: the public factor; None for 1/sqrt(head_dim).
    The queries are those of the last tokens: with fewer queries than keys, the keys come from a `KeyValueCache`, or
    rows of one.
    """

    heads: int
    queries: int
    keys: int
    head_dim: int
    scaled: bool = True
    factor: float | None = None
    sequences: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Temperature:
    """Divides row i of head h of the scores by a learned, public temperature t[h, i].

    Local where products with public numbers are; in a fixed-point engine each costs a truncation.
    """

    heads: int
    queries: int
    keys: int
    sequences: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax:
    """Softmax over each row of `heads x queries x keys` scores, or what stands in for it.

    form: `exact`; `2quad`, (x + c)^2 over its row sum; `relu`, max(x, 0) over its row sum. The mask is public in
    every form, and what it hides adds nothing to a sum. causal: whether a query sees no later key; else it sees all.

    Source: Li et al. 2023, MPCFormer, https://arxiv.org/abs/2211.01452 (2Quad, and 2ReLU as a baseline).
    """

    heads: int
    queries: int
    keys: int
    form: SoftmaxForm = "exact"
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedAttention:
    """`a*I + b*A - c*C` per head (C = uniform causal attention), learned, public scalars a, b, c.

    Local where products with public numbers are; in a fixed-point engine b*A costs a truncation.

    Source: He and Hofmann 2024, "Simplifying Transformer Blocks", section 4.
    """

    heads: int
    queries: int
    keys: int
    sequences: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMix:
    """Per head, attention `queries x keys` times values `keys x head_dim`."""

    heads: int
    queries: int
    keys: int
    head_dim: int
    sequences: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeRows:
    """The rows `first` to `first + taken` of `rows x features` (local)."""

    rows: int
    features: int
    taken: int
    first: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRows:
    """Parts of `rows x features` of `part` rows each, the last of what is left, one below the other (local)."""

    rows: int
    features: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinColumns:
    """Parts of `rows x features` of `part` columns each, the last of what is left, side by side (local)."""

    rows: int
    features: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabProjection:
    """`rows x features` times the output table (`features x vocab`): the logits.

    whole: entries of the table, where only `vocab` of them, from `first` on, are projected onto; None for all.
    """

    rows: int
    features: int
    vocab: int
    first: int = 0
    whole: int | None = None


Op: TypeAlias = (
    TokenEmbedding
    | PositionEmbedding
    | LayerNorm
    | RmsNorm
    | FrozenNorm
    | Linear
    | PackHeads
    | Rotary
    | RepeatHeads
    | KeyValueCache
    | AttentionScores
    | Temperature
    | Softmax
    | ShapedAttention
    | AttentionMix
    | Gelu
    | Relu
    | LeakyRelu
    | Square
    | Silu
    | Sigmoid
    | Tanh
    | Multiply
    | Scale
    | Add
    | ScaledAdd
    | TakeRows
    | JoinRows
    | JoinColumns
    | VocabProjection
)
OP_TYPES: tuple[type, ...] = get_args(Op)


USUAL = {"past_len": 0, "first": 0, "sequences": 1}  # what an op says nothing of


def shape(op: Op) -> dict[str, int]:
    """The dimensions of an op by name; flags, forms, offsets of 0 and a single sequence left out."""
    values = {field.name: getattr(op, field.name) for field in fields(op)}
    return {name: value for name, value in values.items() if type(value) is int and USUAL.get(name) != value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One op of a graph.

    name: unique in its graph, e.g. `layers.3.ffn.up`. What follows an `@` tells parts of one op of the model apart.
    inputs: names of the nodes or graph inputs that it reads, in operand order; `tokens` is the model's input.
    """

    name: str
    layer: LayerId
    op: Op
    inputs: tuple[str, ...]

    @property
    def model_name(self) -> str:
        """The op's name in the model, which its weights carry in a state dict."""
        return self.name.partition("@")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A secret that a graph reads beside its tokens, such as the keys and values of earlier tokens."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpGraph:
    """Nodes in execution order; the last one holds the logits. inputs: what it reads beside `tokens`.

    Raises UserError for a repeated name, an input that no earlier node produces, or a dimension below 1.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...] = ()

    def __post_init__(self) -> None:
        known = {"tokens"} | {each.name for each in self.inputs}
        checked: set[Op] = set()  # layers repeat their ops
        for node in self.nodes:
            if node.name in known:
                raise UserError(f"node names must be unique, but {node.name!r} appears twice.")
            if missing := [name for name in node.inputs if name not in known]:
                raise UserError(f"node {node.name!r} reads {missing}, which no earlier node produces.")
            known.add(node.name)
            if node.op in checked:
                continue
            for name, value in shape(node.op).items():
                if value < 1:
                    raise UserError(f"`{name}` of node {node.name!r} must be at least 1, but got {value}.")
            checked.add(node.op)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)
