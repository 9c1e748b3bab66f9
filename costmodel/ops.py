"""What a decoder-only language model computes, as typed operations with named dimensions.

An `OpGraph` is the single source of truth about a model: it is what a protocol prices and what an engine runs.
Dimensions are in elements; nothing here knows a protocol, a price or a number of bytes. What follows from an op's
dimensions stands with the op: the shapes of what it reads, of its weights and of its output, and how it is rewritten.

Shape conventions: activations are `rows x features` with one row per token; attention works on
`heads x queries x keys`, and the full square is counted although the mask is causal, because secret-shared
engines compute it in full. Rows and heads are those of all `sequences` together: rows token by token, all first tokens
before all second ones, and heads sequence by sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import isfinite, prod
from typing import Any, ClassVar, Literal, Self, TypeAlias

from costmodel.errors import UserError
from costmodel.rotary import RotaryScaling

LayerId: TypeAlias = int | Literal["embed", "head"]
Shape: TypeAlias = tuple[int, ...]
Encoding = Literal["one-hot", "lookup"]
SoftmaxForm = Literal["exact", "2quad", "power8", "relu", "bounded"]
GeluForm = Literal["tanh", "exact", "piecewise"]
RMSNORM_EPSILON = 1e-6  # the default of transformers' Llama; 18 fraction bits cannot tell it from 1e-5
ROTARY_BASE = 10_000.0  # Su et al. 2021, arXiv 2104.09864, and Pythia's configs


@dataclass(frozen=True, kw_only=True, slots=True)
class Op(ABC):
    """One operation. Its fields are its dimensions and forms; class attributes hold of every op of its type.

    label: what figures call it; its own name if empty.
    weights: `hidden` from all parties but their owner; `public`; or `none`. public: whether a deployment shows hidden
        ones to all parties.
    transposed: weights that are turned before a run: an engine that keeps a weight's mask keeps that of an array, not
        of a view. inverted: weights that their owner inverts before, as a division is dear where a product is not.
    has_longer_table: whether its weight is learned for the whole context and may be longer than what `read` needs.
    weight_std: of a drawn matrix of weights; of a transposed one, times the square root of its columns.
    num_inputs: how many it reads where each is shaped as its output is.
    batched: the dimensions of which several sequences have so many times more.
    is_rowwise: whether a row of its output is computed from the same row of what it reads.
    is_product: whether it is a matrix product: one kernel, and so one fit of seconds, whatever the op.
    is_local: whether it only moves or adds up what it reads, so that the parties need not talk.
    works_on_rows: whether it also has something to do per row, such as an inverse root.
    """

    label: ClassVar[str] = ""
    weights: ClassVar[Literal["none", "hidden", "public"]] = "none"
    transposed: ClassVar[tuple[str, ...]] = ()
    inverted: ClassVar[tuple[str, ...]] = ()
    has_longer_table: ClassVar[bool] = False
    weight_std: ClassVar[float | None] = None
    num_inputs: ClassVar[int] = 1
    batched: ClassVar[tuple[str, ...]] = ("rows",)
    is_rowwise: ClassVar[bool] = False
    is_product: ClassVar[bool] = False
    is_local: ClassVar[bool] = False
    works_on_rows: ClassVar[bool] = False

    public: bool = False

    @property
    def hides_weights(self) -> bool:
        """Whether it has weights that some party must not see."""
        return self.weights == "hidden" and not self.public

    @property
    @abstractmethod
    def output_shape(self) -> Shape:
        """The shape of its output."""

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        """The shapes of what it reads from other ops."""
        return (self.output_shape,) * self.num_inputs

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """The shapes of its deployed weights by suffix to the node's name; of a longer table, as long as it needs."""
        return {}

    @property
    def read(self) -> tuple[int, range] | None:
        """The axis of its weight of which it reads a part, and which entries; None where it reads all."""
        return None

    @property
    def work(self) -> dict[str, int]:
        """How much of what its seconds grow with, by unit, beside what matrix products do."""
        if self.is_product:
            return {}
        rows = {"rows": prod(self.output_shape[:-1])} if self.works_on_rows else {}
        return rows | {"elements": prod(self.output_shape)}

    def of_rows(self, first: int, taken: int) -> Self:
        """A row-wise op on rows `first` to `first + taken` of its own; if it knows its position, so many tokens on."""
        values: dict[str, Any] = {self.batched[0]: taken}
        if hasattr(self, "past_len"):
            values["past_len"] = self.past_len + first
        return replace(self, **values)

    def in_batch(self, batch: int) -> Self:
        """The op for so many sequences at once, which it tells apart if it has `sequences`."""
        names = (*self.batched, *(["sequences"] if hasattr(self, "sequences") else []))
        return replace(self, **{name: getattr(self, name) * batch for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class OnRows(Op):
    """An op on `rows x features`, of which its output has as many unless it says otherwise; here each row by itself."""

    is_rowwise = True

    rows: int
    features: int

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return ((self.rows, self.features),) * self.num_inputs

    @property
    def output_shape(self) -> Shape:
        return (self.rows, self.features)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnScores(Op):
    """An op on `heads x queries x keys`, which its output has too."""

    batched = ("heads",)

    heads: int
    queries: int
    keys: int

    @property
    def output_shape(self) -> Shape:
        return (self.heads, self.queries, self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEmbedding(Op):
    """One-hot tokens (`tokens x vocab`) times the embedding table (`vocab x features`).

    encoding: `one-hot`, by the client in the clear; `lookup`, under the protocol, from tokens shared as integers.
    scale: what the table's owner multiplies it by before a run.
    """

    label = "embedding"
    weights = "hidden"
    weight_std = 0.5
    batched = ("tokens",)
    is_rowwise = True
    is_product = True

    tokens: int
    vocab: int
    features: int
    encoding: Encoding = "one-hot"
    scale: float = 1.0

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return ((self.tokens,) if self.encoding == "lookup" else (self.tokens, self.vocab),)

    @property
    def output_shape(self) -> Shape:
        return (self.tokens, self.features)

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.vocab, self.features)}

    @property
    def work(self) -> dict[str, int]:
        return {"comparisons": self.tokens * self.vocab} if self.encoding == "lookup" else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionEmbedding(OnRows):
    """Adds the learned positions of `rows` tokens (`rows x features`) that follow `past_len` others; local.

    The tokens of several `sequences` stand side by side: all first ones, then all second ones.
    """

    label = "embedding"
    weights = "hidden"
    weight_std = 0.5
    has_longer_table = True

    past_len: int = 0
    sequences: int = 1

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.past_len + self.rows // self.sequences, self.features)}

    @property
    def read(self) -> tuple[int, range]:
        return 0, range(self.past_len, self.past_len + self.rows // self.sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNorm(OnRows):
    """Normalises each row to zero mean and unit variance, then applies gain and bias unless they are folded away.

    bias: whether a norm with a gain has a bias.
    """

    label = "LayerNorm"
    weights = "hidden"
    works_on_rows = True

    affine: bool = True
    bias: bool = True

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return dict.fromkeys(("weight", "bias")[: self.affine + (self.affine and self.bias)], (self.features,))


@dataclass(frozen=True, kw_only=True, slots=True)
class RmsNorm(OnRows):
    """Divides each row by its root mean square, then applies a gain unless it is folded away.

    epsilon: added to the mean of squares.
    groups: equal parts of a row, each normalised by itself and times the same gain, as heads of queries are.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4.
    """

    label = "RMSNorm"
    weights = "hidden"
    works_on_rows = True

    affine: bool = True
    epsilon: float = RMSNORM_EPSILON
    groups: int = 1

    def __post_init__(self) -> None:
        if self.groups < 1 or self.features % self.groups:
            raise UserError(f"`groups` of an RmsNorm must divide its {self.features} features, but got {self.groups}.")

    @property
    def num_roots(self) -> int:
        """Mean squares that a root is taken of."""
        return self.rows * self.groups

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.features // self.groups,)} if self.affine else {}

    @property
    def work(self) -> dict[str, int]:
        return {"rows": self.num_roots, "elements": self.rows * self.features}


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenNorm(OnRows):
    """A norm whose deviation is a constant: `gain * (x - mean(x)) + bias`, or `gain * x` if it is not centred.

    Linear, so folding leaves nothing of it; the gain has taken up the constant 1/sigma. Its work is as if centred.

    Source: Baroni et al. 2025, "Transformers Don't Need LayerNorm at Inference Time", https://arxiv.org/abs/2507.02559.
    """

    label = "frozen norm"
    weights = "hidden"

    centred: bool

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return dict.fromkeys(("weight", "bias")[: 1 + self.centred], (self.features,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear(Op):
    """`rows x in_features` times a weight of `in_features x out_features`, plus an optional bias."""

    label = "linear"
    weights = "hidden"
    weight_std = 0.25  # little is added to the residual stream, so that logits stay of order 1
    transposed = ("weight",)
    is_rowwise = True
    is_product = True

    rows: int
    in_features: int
    out_features: int
    bias: bool

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return ((self.rows, self.in_features),)

    @property
    def output_shape(self) -> Shape:
        return (self.rows, self.out_features)

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        bias: dict[str, Shape] = {"bias": (self.out_features,)} if self.bias else {}
        return {"weight": (self.out_features, self.in_features), **bias}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackHeads(Op):
    """Lays queries, keys and values of separate linears side by side (local).

    query_features, key_features: of one token's queries, and of its keys as of its values.
    """

    is_rowwise = True
    is_local = True

    rows: int
    query_features: int
    key_features: int

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return ((self.rows, self.query_features), *((self.rows, self.key_features),) * 2)

    @property
    def output_shape(self) -> Shape:
        return (self.rows, self.query_features + 2 * self.key_features)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary(Op):
    """Rotates the first `rotary_dim` features of every query and key head by public angles, `past_len` tokens on.

    key_heads: heads of the keys, and of the values behind them, where there are fewer than of the queries.
    base, scaling: of the angles; without scaling pair f of a head turns by position x base^(-2 f / rotary_dim).
    It reads heads of any width, and its shapes are those of the least; `output_shapes` of a graph knows the others.

    Local where products with public numbers are; in a fixed-point engine each costs a truncation.
    """

    is_rowwise = True

    rows: int
    heads: int
    rotary_dim: int
    past_len: int = 0
    key_heads: int | None = None
    base: float = ROTARY_BASE
    scaling: RotaryScaling | None = None
    sequences: int = 1

    @property
    def output_shape(self) -> Shape:
        return (self.rows, (self.heads + 2 * (self.key_heads or self.heads)) * self.rotary_dim)

    @property
    def work(self) -> dict[str, int]:
        return {"elements": self.rows * (self.heads + (self.key_heads or self.heads)) * self.rotary_dim}


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatHeads(Op):
    """Copies each key and value head for all query heads that share it (local).

    Source: Ainslie et al. 2023, grouped-query attention, https://arxiv.org/abs/2305.13245, section 2.2.
    """

    is_rowwise = True
    is_local = True

    rows: int
    heads: int
    key_heads: int
    head_dim: int

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return ((self.rows, (self.heads + 2 * self.key_heads) * self.head_dim),)

    @property
    def output_shape(self) -> Shape:
        return (self.rows, 3 * self.heads * self.head_dim)

    @property
    def work(self) -> dict[str, int]:
        return {"elements": self.rows * self.heads * self.head_dim}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValueCache(Op):
    """The keys and values of `past_len` tokens, an input of the graph, followed by those of `rows` new tokens (local).

    features: of the keys and values of one token together, or of the keys or the values alone; the last ones of what
        is read of a new token. With a `past_len` of 0 there is no input but that.
    """

    batched = ("past_len", "rows")
    is_local = True

    past_len: int
    rows: int
    features: int

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return (*([(self.past_len, self.features)] if self.past_len else []), (self.rows, self.features))

    @property
    def output_shape(self) -> Shape:
        return (self.past_len + self.rows, self.features)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionScores(OnScores):
    """Per head, `queries x head_dim` times `head_dim x keys`, with a public factor if `scaled`.

    factor: the public factor; None for 1/sqrt(head_dim). causal: whether a query's scores of later keys are not used.
    The queries are those of the last tokens: with fewer queries than keys, the keys come from a `KeyValueCache`, or
    rows of one.
    """

    label = "attention products"
    is_product = True

    head_dim: int
    scaled: bool = True
    factor: float | None = None
    causal: bool = True
    sequences: int = 1

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        width = self.heads // self.sequences * self.head_dim
        packed = (self.queries * self.sequences, 3 * width)
        return (packed, *([(self.keys * self.sequences, 2 * width)] if self.queries < self.keys else []))


@dataclass(frozen=True, kw_only=True, slots=True)
class Temperature(OnScores):
    """Divides row i of head h of the scores by a learned, public temperature t[h, i].

    Local where products with public numbers are; in a fixed-point engine each costs a truncation.
    """

    label = "temperature"
    weights = "public"
    inverted = ("weight",)
    has_longer_table = True

    sequences: int = 1

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.heads // self.sequences, self.keys)}

    @property
    def read(self) -> tuple[int, range]:
        return 1, range(self.keys - self.queries, self.keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreBound(OnScores):
    """Takes a learned, public number of each head from its scores (local): in the place of every row's maximum, or so
    that an even power grows with the score.
    """

    label = "bound"
    weights = "public"
    is_local = True

    sequences: int = 1

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.heads // self.sequences,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax(OnScores):
    """Softmax over each row of `heads x queries x keys` scores, or what stands in for it.

    form: `exact`; `2quad`, (x + c)^2 over its row sum; `power8`, x^8 over its row sum, three squares, of scores that a
        `ScoreBound` has moved; `relu`, max(x, 0) over its row sum; `bounded`, exp(x) over its row sum of scores that a
        `ScoreBound` has brought below 0, equal to `exact` where it has. The mask is public in every form, and what it
        hides adds nothing to a sum; with `power8` a row that sees one key attends to it, whatever its score is.
    causal: whether a query sees no later key; else it sees all.

    Source: Li et al. 2023, MPCFormer, https://arxiv.org/abs/2211.01452 (2Quad, and 2ReLU as a baseline); Zimerman et
    al. 2024, "Power-Softmax", arXiv 2410.09457 (an even power of the scores over its row sum).
    """

    label = "softmax"
    works_on_rows = True

    form: SoftmaxForm = "exact"
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedAttention(OnScores):
    """`a*I + b*A - c*C` per head (C = uniform causal attention), learned, public scalars a, b, c.

    Local where products with public numbers are; in a fixed-point engine b*A costs a truncation.

    Source: He and Hofmann 2024, "Simplifying Transformer Blocks", section 4.
    """

    weights = "public"

    sequences: int = 1

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return dict.fromkeys(("identity", "softmax", "uniform"), (self.heads // self.sequences,))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMix(OnScores):
    """Per head, attention `queries x keys` times values `keys x head_dim`."""

    label = "attention products"
    is_product = True

    head_dim: int
    sequences: int = 1

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        width = self.heads // self.sequences * self.head_dim
        return (self.heads, self.queries, self.keys), (self.keys * self.sequences, width)

    @property
    def output_shape(self) -> Shape:
        return (self.queries * self.sequences, self.heads // self.sequences * self.head_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gelu(OnRows):
    """GELU of every element: in the tanh or the exact (erf) form, or by polynomials between thresholds."""

    label = "GELU"

    form: GeluForm


@dataclass(frozen=True, kw_only=True, slots=True)
class Relu(OnRows):
    """ReLU of every element."""

    label = "ReLU"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakyRelu(OnRows):
    """Leaky ReLU of every element with one learned negative slope per layer."""

    label = "leaky ReLU"
    weights = "hidden"

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"slope": (1,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Square(OnRows):
    """The square of every element plus a public number, `shift`: one product, no comparison."""

    label = "square"

    shift: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Silu(OnRows):
    """SiLU of every element: x times the logistic function of x."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sigmoid(OnRows):
    """The logistic function of every element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tanh(OnRows):
    """The hyperbolic tangent of every element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply(OnRows):
    """Element-wise product of two activations."""

    num_inputs = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale(OnRows):
    """Every element times one public number, `factor`, that is in the architecture and not learned.

    Local where products with public numbers are; in a fixed-point engine each costs a truncation.

    Raises UserError for a factor that leaves nothing to do, or nothing of its operand: 1, 0 or one that is not finite.
    """

    factor: float

    def __post_init__(self) -> None:
        if self.factor in (0, 1) or not isfinite(self.factor):
            raise UserError(f"`factor` of a Scale must be finite and neither 0 nor 1, but got {self.factor}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Add(OnRows):
    """Element-wise sum of two activations (local)."""

    label = "residual"
    num_inputs = 2
    is_local = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledAdd(OnRows):
    """`beta * residual + branch / alpha` with learned scalars (local only if folded into neighbouring weights)."""

    label = "scaled residual"
    weights = "hidden"
    inverted = ("alpha",)
    num_inputs = 2

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"alpha": (), "beta": ()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeRows(OnRows):
    """The rows `first` to `first + taken` of `rows x features` (local)."""

    batched = ("rows", "taken", "first")
    is_rowwise = False
    is_local = True

    taken: int
    first: int = 0

    @property
    def output_shape(self) -> Shape:
        return (self.taken, self.features)

    @property
    def work(self) -> dict[str, int]:
        return {"elements": self.rows * self.features}


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRows(OnRows):
    """Parts of `rows x features` of `part` rows each, the last of what is left, one below the other (local)."""

    batched = ("rows", "part")
    is_rowwise = False
    is_local = True

    part: int

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return tuple((min(self.part, self.rows - first), self.features) for first in range(0, self.rows, self.part))


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinColumns(OnRows):
    """Parts of `rows x features` of `part` columns each, the last of what is left, side by side (local)."""

    is_rowwise = False
    is_local = True

    part: int

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return tuple((self.rows, min(self.part, self.features - first)) for first in range(0, self.features, self.part))


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabProjection(OnRows):
    """`rows x features` times the output table (`features x vocab`): the logits.

    whole: entries of the table, where only `vocab` of them, from `first` on, are projected onto; None for all.
    """

    label = "vocabulary"
    weights = "hidden"
    weight_std = 1.0
    transposed = ("weight",)
    is_product = True

    vocab: int
    first: int = 0
    whole: int | None = None

    @property
    def output_shape(self) -> Shape:
        return (self.rows, self.vocab)

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.whole or self.vocab, self.features)}

    @property
    def read(self) -> tuple[int, range] | None:
        return None if self.whole is None else (0, range(self.first, self.first + self.vocab))


OP_TYPES: tuple[type[Op], ...] = (
    TokenEmbedding, PositionEmbedding, LayerNorm, RmsNorm, FrozenNorm, Linear, PackHeads, Rotary, RepeatHeads,
    KeyValueCache, AttentionScores, Temperature, ScoreBound, Softmax, ShapedAttention, AttentionMix, Gelu, Relu,
    LeakyRelu, Square, Silu, Sigmoid, Tanh, Multiply, Scale, Add, ScaledAdd, TakeRows, JoinRows, JoinColumns,
    VocabProjection,
)  # fmt: skip
USUAL = {"past_len": 0, "first": 0, "sequences": 1, "groups": 1}  # what an op says nothing of


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
        known = {"tokens"} | {graph_input.name for graph_input in self.inputs}
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


def output_shapes(graph: OpGraph) -> dict[str, Shape]:
    """The shape of every node's output, by name; a rotation's is that of what it reads."""
    shapes: dict[str, Shape] = {}
    for node in graph:
        shapes[node.name] = shapes[node.inputs[0]] if isinstance(node.op, Rotary) else node.op.output_shape
    return shapes
