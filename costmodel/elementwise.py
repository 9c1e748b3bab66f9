"""Ops that treat every element of `rows x features` alike: activations, products and sums.

Ops of `costmodel.ops`, which names them all. Scores of attention are `heads * queries` rows of `keys` features.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from costmodel.errors import UserError

GeluForm = Literal["tanh", "exact", "piecewise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gelu:
    """GELU of every element: in the tanh or the exact (erf) form, or by polynomials between thresholds."""

    rows: int
    features: int
    form: GeluForm


@dataclass(frozen=True, kw_only=True, slots=True)
class Relu:
    """ReLU of every element."""

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakyRelu:
    """Leaky ReLU of every element with one learned negative slope per layer."""

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Square:
    """The square of every element: one product, no comparison."""

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Silu:
    """SiLU of every element: x times the logistic function of x."""

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sigmoid:
    """The logistic function of every element."""

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tanh:
    """The hyperbolic tangent of every element."""

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply:
    """Element-wise product of two activations."""

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Every element times one public number, `factor`, that is in the architecture and not learned.

    Local where products with public numbers are; in a fixed-point engine each costs a truncation.

    Raises UserError for a factor that leaves nothing to do, or nothing of its operand: 1, 0 or one that is not finite.
    """

    rows: int
    features: int
    factor: float

    def __post_init__(self) -> None:
        if self.factor in (0, 1) or not isfinite(self.factor):
            raise UserError(f"`factor` of a Scale must be finite and neither 0 nor 1, but got {self.factor}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Add:
    """Element-wise sum of two activations (local)."""

    rows: int
    features: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledAdd:
    """`beta * residual + branch / alpha` with learned scalars (local only if folded into neighbouring weights)."""

    rows: int
    features: int
