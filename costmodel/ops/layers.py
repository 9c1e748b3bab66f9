"""Ops on rows of features: embeddings, norms, linears, activations, sums, slices, and the vocabulary projection."""

from dataclasses import dataclass
from math import isfinite

from costmodel.errors import UserError
from costmodel.ops.op import RMSNORM_EPSILON, Encoding, GeluForm, OnRows, Op, Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEmbedding(Op):
    """One-hot tokens (`tokens x vocab`) times the embedding table (`vocab x features`).

    encoding: `one-hot` if the client encodes its tokens in plaintext; `lookup` if it shares them as integers, which the
        parties compare with the vocabulary under the protocol.
    scale: factor by which the owner of the table multiplies the table before a run.
    """

    label = "embedding"
    weights = "hidden"
    weight_std = 0.5
    output_dims = ("tokens", "features")
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
    def weight_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.vocab, self.features)}

    @property
    def work(self) -> dict[str, int]:
        return {"comparisons": self.tokens * self.vocab} if self.encoding == "lookup" else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionEmbedding(OnRows):
    """Add to each token (`rows x features`) the learned vector of its position.

    past_len: earlier tokens of each sequence. rows: new tokens of all `sequences`, interleaved: all first ones, then
        all second ones. The sum is local; a server that holds the weight shares it first.
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
    """Normalise each row to zero mean and unit variance, then apply a gain and bias; 1e-5 is added to the variance.

    affine: whether it has a gain; False if gain and bias are folded away. bias: whether it has a bias beside a gain.
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
    """Divide each row by its root mean square, then apply a gain.

    affine: whether it has a gain; False if the gain is folded away. epsilon: added to the mean of squares.
    groups: number of equal parts of a row, such as heads; each is normalised by itself and multiplied by the same gain.

    Raises UserError unless `groups` divides `features`.

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
        """Number of inverse roots: one per row and group."""
        return self.rows * self.groups

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.features // self.groups,)} if self.affine else {}

    @property
    def work(self) -> dict[str, int]:
        return {"rows": self.num_roots, "elements": self.rows * self.features}


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenNorm(OnRows):
    """A norm with a constant standard deviation: `gain * (x - mean(x)) + bias`, or `gain * x` if it is not centred.

    It is linear, so folding can remove it. The gain includes 1 / the constant. `work` does not depend on `centred`.

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
    """`rows x in_features` times the transpose of a weight `out_features x in_features`, plus an optional bias."""

    label = "linear"
    weights = "hidden"
    weight_std = 0.25  # little is added to the residual stream, so that logits stay of order 1
    transposed = ("weight",)
    input_dims, output_dims = ("rows", "in_features"), ("rows", "out_features")
    is_rowwise = True
    is_product = True

    rows: int
    in_features: int
    out_features: int
    bias: bool

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        bias: dict[str, Shape] = {"bias": (self.out_features,)} if self.bias else {}
        return {"weight": (self.out_features, self.in_features), **bias}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gelu(OnRows):
    """GELU of every element: form `tanh`, `exact` (erf), or `piecewise` (polynomials between thresholds)."""

    label = "GELU"

    form: GeluForm


@dataclass(frozen=True, kw_only=True, slots=True)
class Relu(OnRows):
    """ReLU of every element."""

    label = "ReLU"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakyRelu(OnRows):
    """Leaky ReLU of every element, with one learned slope for all negative elements."""

    label = "leaky ReLU"
    weights = "hidden"

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"slope": (1,)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Square(OnRows):
    """x^2 + `shift` for every element x, with a public number `shift`: one product, no comparison."""

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
    """Every element times one public number, `factor`, that is part of the architecture and not learned.

    In fixed point, each product with a public number costs a truncation, which some protocols do locally.

    Raises UserError for a factor of 1, of 0, or that is not finite.
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
    """`beta * residual + branch / alpha` with learned, hidden scalars; if they are folded away, an `Add` is left."""

    label = "scaled residual"
    weights = "hidden"
    inverted = ("alpha",)
    num_inputs = 2

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"alpha": (), "beta": ()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeRows(OnRows):
    """The rows from `first` to `first + taken - 1` of `rows x features` (local)."""

    output_dims = ("taken", "features")
    batched = ("rows", "taken", "first")
    is_rowwise = False
    is_local = True

    taken: int
    first: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeColumns(OnRows):
    """The columns from `first` to `first + taken - 1` of `rows x features`, such as a packed linear's gate (local)."""

    output_dims = ("rows", "taken")
    is_local = True

    taken: int
    first: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRows(OnRows):
    """Concatenate blocks of `part` rows each (the last may be smaller) to `rows x features` (local)."""

    batched = ("rows", "part")
    is_rowwise = False
    is_local = True

    part: int

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return tuple((min(self.part, self.rows - first), self.features) for first in range(0, self.rows, self.part))


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinColumns(OnRows):
    """Concatenate blocks of `part` columns each (the last may be smaller) to `rows x features` (local)."""

    is_rowwise = False
    is_local = True

    part: int

    @property
    def input_shapes(self) -> tuple[Shape, ...]:
        return tuple((self.rows, min(self.part, self.features - first)) for first in range(0, self.features, self.part))


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabProjection(OnRows):
    """The logits: `rows x features` times the transpose of the output table (`vocab x features`).

    whole: number of entries of the table, if only `vocab` of them, from `first` on, are computed; None if all are.
    """

    label = "vocabulary"
    weights = "hidden"
    weight_std = 1.0
    transposed = ("weight",)
    output_dims = ("rows", "vocab")
    is_product = True

    vocab: int
    first: int = 0
    whole: int | None = None

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.whole or self.vocab, self.features)}

    @property
    def read(self) -> tuple[int, range] | None:
        return None if self.whole is None else (0, range(self.first, self.first + self.vocab))
