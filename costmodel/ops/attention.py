"""Ops of attention: on `heads x queries x keys` scores, or on the queries, keys and values of each row."""

from dataclasses import dataclass
from math import isfinite

from costmodel.errors import UserError
from costmodel.ops.op import ROTARY_BASE, OnScores, Op, Shape, SoftmaxForm
from costmodel.ops.rotary import RotaryScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class PackHeads(Op):
    """Place the queries, keys and values of separate linears side by side, in this order (local).

    query_features: features of one token's queries. key_features: features of its keys; its values have as many.
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
    """Rotate the first `rotary_dim` features of every query and key head by public angles.

    past_len: number of earlier tokens of each sequence, and thus the position of its first row.
    heads: number of query heads. key_heads: number of key heads, and of value heads; None for as many as query heads.
    base, scaling: features f and f + rotary_dim / 2 of a head turn together by position x base^(-2 f / rotary_dim)
        radians, which a `scaling` reduces for slow pairs.
    If heads are wider than `rotary_dim`, the output is wider than `output_shape`; the function `output_shapes` returns
    its real shape.

    In fixed point, each product with a public number costs a truncation, which some protocols do locally.
    """

    keeps_shape = True
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
    """Repeat each key and value head for all query heads that share it (local); the queries are not changed.

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

    past_len, rows: tokens of all sequences together. If `past_len` is 0, the new tokens are the only input.
    features: features of one token's keys and values together, or of its keys or values alone. If the new tokens' input
        is wider, such as packed queries, keys and values, only its last `features` columns are used.
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
    """The scores: per head, queries (`queries x head_dim`) times keys transposed, times a public factor if `scaled`.

    factor: the public factor; None for 1/sqrt(head_dim). causal: whether a query's scores for later keys are unused.
    The queries are those of the last tokens. If they are fewer than the keys, the keys are read from a second input,
    such as a `KeyValueCache`. Raises UserError for a factor that is 0 or not finite.
    """

    label = "attention products"
    is_product = True

    head_dim: int
    scaled: bool = True
    factor: float | None = None
    causal: bool = True
    sequences: int = 1

    def __post_init__(self) -> None:
        if self.factor is not None and (self.factor == 0 or not isfinite(self.factor)):
            raise UserError(f"`factor` of attention scores must be finite and not 0, but got {self.factor}.")

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        width = self.heads // self.sequences * self.head_dim
        packed = (self.queries * self.sequences, 3 * width)
        return (packed, *([(self.keys * self.sequences, 2 * width)] if self.queries < self.keys else []))


@dataclass(frozen=True, kw_only=True, slots=True)
class Temperature(OnScores):
    """Divide the scores of head h and the query at position i by a learned, public temperature t[h, i].

    In fixed point, each product with a public number costs a truncation, which some protocols do locally.
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
    """Subtract a public number per head from its scores (local).

    A softmax of form `bounded` needs it in place of each row's maximum; the number is then set from scores on text. One
    of form `power8` needs it to make the scores positive, so that their eighth power grows with them; the number is
    then learned.
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
    """Softmax over each row of `heads x queries x keys` scores, or a cheaper function in its place.

    form: `exact`; `2quad`, (x + 5)^2 over its row sum; `power8`, x^8 over its row sum, by three squarings, after a
        `ScoreBound`; `relu`, max(x, 0) over 2^-10 plus its row sum; `bounded`, exp(x) over its row sum, which equals
        `exact` if a `ScoreBound` has made the scores small enough for exp. The mask is public in every form, and masked
        scores add nothing to a sum. With `power8`, a row that sees one key gives it the weight 1.
    causal: whether a query sees no later key; otherwise it sees all keys.

    Source: Li et al. 2023, MPCFormer, https://arxiv.org/abs/2211.01452 (2Quad, and 2ReLU as a baseline); Zimerman et
    al. 2024, "Power-Softmax", arXiv 2410.09457 (an even power of the scores over its row sum).
    """

    label = "softmax"
    works_on_rows = True

    form: SoftmaxForm = "exact"
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedAttention(OnScores):
    """`a*I + b*A - c*C` per head: A are attention weights (the input), I is the identity, C uniform causal attention.

    a, b and c are learned, public scalars. In fixed point b*A costs a truncation, which some protocols do locally.

    Source: He and Hofmann 2024, "Simplifying Transformer Blocks", section 4.
    """

    weights = "public"

    sequences: int = 1

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return dict.fromkeys(("identity", "softmax", "uniform"), (self.heads // self.sequences,))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMix(OnScores):
    """Per head, attention weights (`queries x keys`) times values (`keys x head_dim`), heads then side by side."""

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
