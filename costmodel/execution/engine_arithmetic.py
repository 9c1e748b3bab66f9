"""The emulated fixed point of SecretFlow-SPU and of CrypTen: their functions, and where their results are right."""

from typing import Any

import numpy as np
from numpy.polynomial.chebyshev import chebval

from costmodel import ops
from costmodel.execution.arithmetic import Arithmetic
from costmodel.execution.op_functions import (
    FUNCTIONS,
    GELU_TANH_CUBIC,
    Array,
    Weights,
    numpy_library,
    rounded_to,
)
from costmodel.ops import Node
from costmodel.protocols import crypten
from costmodel.protocols.fixed_point import EXPONENTIAL_SQUARINGS as SPU_SQUARINGS
from costmodel.protocols.fixed_point import VERY_SMALL_UNITS
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

# coefficients of odd Chebyshev polynomials of x / TANH_END. Source: SecretFlow-SPU 0.9.5, fxp_approx.cc, tanh_chebyshev
TANH = (
    1.2514045938932097, -0.3655987797163166, 0.17253141478140663, -0.08943445792774211, 0.047703017901250824,
    -0.025830290571688078, 0.014338801903468182, -0.008541730970059077, 0.0061230685785789475,
)  # fmt: skip
TANH_END = 5.0  # beyond which tanh is constant
SCALED = (ops.Linear, ops.VocabProjection)  # under CrypTen, (x / WEIGHT_SCALE) @ (WEIGHT_SCALE * matrix)


class SpuArithmetic(Arithmetic):
    """The fixed point of SecretFlow-SPU 0.9.5, which is the same under each of its protocols.

    Source of the limits: tests/costmodel/execution/test_arithmetic.py measures them. With f fraction bits, a product is
    wrong from 2^(ring_bits - 2 - 2f) on, and the inverse or inverse root of a number from 2^(f - 1) on is 0.
    """

    LOWEST_EXPONENT = -480.0  # (1 + x / 256)^256 is 0 there, and 0.37 at -511
    LOWEST_LOGIT = -240.0  # at -256 the engine's exp(-x) = 2^256 is 0 in the ring, so the logistic function is 1
    FEWEST_UNITS = 5.0  # an inverse root of fewer units is off by a tenth or more if rounding adds a unit

    def __init__(self, setting: EngineSetting, **of: Any) -> None:
        super().__init__(setting, **of)
        self.most_product, self.most_divisor = self.most * self.unit, 0.5 / self.unit
        self.highest_exponent = float(np.log(self.most_product)) - 0.5
        # times -x: probability that an overflowed exponential, which is random, is nearer to 0 than 16 x, so that x
        # times its inverse is off by more than 1 / 16
        self.overflowed = 8 / self.most_product

    def encoded(self, node: Node, value: Array) -> Array:
        """Return a weight as the engine encodes it, which cuts off the digits after the last bit."""
        value = rounded_to(self.unit, value, np.trunc)
        self.require("weights", value, -self.most, self.most)
        return self.number(value)

    def is_exact(self, factor: float) -> bool:
        """Return whether a factor is so small that the engine first enlarges it by a power of two."""
        return abs(factor) < VERY_SMALL_UNITS * self.unit

    def product(self, value: Array) -> Array:
        self.require("products", value, -self.most_product, self.most_product)
        return self.truncated(value)

    def exp(self, source: Array) -> Array:
        self.require("arguments of exponentials", source, self.LOWEST_EXPONENT, self.highest_exponent)
        result = self.rounded(1 + source / 2**SPU_SQUARINGS)
        for _ in range(SPU_SQUARINGS):
            result = self.rounded(np.square(result))
        return result

    def divide(self, numerator: Array, source: Array) -> Array:
        self.require("divisors", source, -self.most_divisor, self.most_divisor)
        return self.inverse(source)

    def inverse(self, source: Array) -> Array:
        """Return inverses; that of 0 is 0, as under the engine."""
        return self.rounded(np.divide(1.0, source, out=np.zeros_like(source), where=source != 0))

    def rsqrt(self, source: Array) -> Array:
        self.require("arguments of inverse roots", source, 0.0, self.most_divisor)
        counts = np.arange(len(source)) % self.num_sequences < self.num_sequences - self.num_extreme
        self.may_fail(float(np.where(source < self.FEWEST_UNITS * self.unit, self.doubt, 0.0)[counts].sum()))
        return self.number(self.inverse(np.sqrt(source.view(np.ndarray))))

    def mean_square(self, source: Array) -> Array:
        """Return mean squares; set `doubt` to the probability that the first of two random roundings is smaller."""
        share = np.square(source.view(np.ndarray)).mean(axis=-1, keepdims=True) / self.unit % 1
        self.doubt = share * (1 - share)
        return np.square(source).sum(axis=-1, keepdims=True) * (1 / source.shape[-1])

    def erf(self, source: Array) -> Array:
        return self.number(self.rounded(numpy_library().erf(source.view(np.ndarray))))

    def tanh(self, source: Array) -> Array:
        odd = [coefficient for term in TANH for coefficient in (0.0, term)]
        return self.rounded(
            chebval(  # type: ignore[no-untyped-call]
                np.clip(source, -TANH_END, TANH_END) / TANH_END, odd
            )
        )

    def logistic(self, source: Array) -> Array:
        """Return 1 / (1 + exp(-x)). An exponential that overflows is random, and its inverse is nearly always 0."""
        source = source.view(np.ndarray)
        self.require("arguments of logistic functions", source, self.LOWEST_LOGIT, -self.LOWEST_EXPONENT)
        overflowed = source < -self.highest_exponent
        self.may_fail(-float(source[overflowed].sum()) * self.overflowed)
        powers = self.rounded(np.exp(-np.maximum(source, -self.highest_exponent)))
        return self.number(np.where(overflowed, 0.0, self.inverse(powers + 1)))


class CryptenArithmetic(Arithmetic):
    """The fixed point of CrypTen 0.4.1 with the functions of `engine.crypten_arrays`.

    Each party truncates its share of a product by itself, so that with f fraction bits a result x is wrong by
    2^(64 - 2f) with probability |x| / 2^(64 - 2f), which ruins the answer. Sums of squares are divided without this
    error, but must be below 2^(63 - 2f). Source: Mohassel and Zhang 2017, SecureML, theorem 1, https://eprint.iacr.org/2017/396.
    """

    EXPONENTS = (-240.0, 15.0)  # of (1 + u + u^2 / 2)^128 with u = x / 128, which is 1 again at -256
    LOGITS = 240.0  # largest magnitude of the argument of a logistic function
    INVERTED = (2.0**-12, 2.0**17)  # within the ranges of `crypten_arrays.reciprocal` and `inverse_root`
    MOST_OF_ERF = 1.5  # there, the Taylor series of erf with 8 terms is off by 0.003; at 2, by 0.24

    def evaluate(self, node: Node, operands: Weights, *inputs: Array) -> Array:
        # each token of an answer takes just one row of the logits, so only one row per sequence counts
        rows = node.op.rows if isinstance(node.op, ops.VocabProjection) else self.num_sequences
        self.share = self.num_sequences / rows * 2.0**-self.setting.ring_bits / self.unit**2
        if isinstance(node.op, SCALED):  # whose input is divided by WEIGHT_SCALE
            self.op, divided = node.name, self.secret(inputs[0]).view(np.ndarray) / crypten.WEIGHT_SCALE
            self.truncates(_sum(divided))
            inputs = (self.number(self.truncated(divided) * crypten.WEIGHT_SCALE),)
        return super().evaluate(node, operands, *inputs)

    def encoded(self, node: Node, value: Array) -> Array:
        """Return a weight as encoded; matrices of `SCALED` ops are stored times WEIGHT_SCALE, and not checked."""
        if isinstance(node.op, SCALED) and value.ndim == 2:
            return self.number(self.rounded(value, crypten.WEIGHT_SCALE))
        return super().encoded(node, value)

    def is_exact(self, factor: float) -> bool:
        """Return whether a factor is 1 / an integer, by which the engine divides instead."""
        return bool(factor) and abs((divisor := 1 / factor) - round(divisor)) < 1e-9

    def truncates(self, total: float) -> None:
        """Add to `wrong` the expected number of wrong truncations of numbers whose magnitudes sum to `total`."""
        self.may_fail(total * self.share)

    def product(self, value: Array) -> Array:
        self.truncates(_sum(value) * self.scale)
        return self.truncated(value)

    def exp(self, source: Array) -> Array:
        self.require("arguments of exponentials", source, *self.EXPONENTS)
        self.truncates(_squared_exponentials(source))
        return self.rounded(np.exp(source))

    def divide(self, numerator: Array, source: Array) -> Array:
        self.require("sums of rows", source, *self.INVERTED)
        inverse = self.rounded(1 / source, crypten.INVERSE_SCALE)
        self.truncates(crypten.INVERSE_SCALE * (source.size + _sum(inverse)))
        return self.number(inverse, crypten.INVERSE_SCALE)

    def rsqrt(self, source: Array) -> Array:
        source = source.view(np.ndarray)
        self.require("mean squares", source, *self.INVERTED)
        return self.number(self.rounded(1 / np.sqrt(source), crypten.ROOT_SCALE), crypten.ROOT_SCALE)

    def mean_square(self, source: Array) -> Array:
        sums = np.square(source.view(np.ndarray)).sum(axis=-1, keepdims=True)
        most = 2.0 ** (self.setting.ring_bits - 1) * self.unit**2
        self.require("sums of squares", sums, 0.0, most, with_fewer_bits=True)
        return self.number(sums / source.shape[-1], crypten.MEAN_SCALE)

    def erf(self, source: Array) -> Array:
        source = source.view(np.ndarray)
        self.require("arguments of the error function", source, -self.MOST_OF_ERF, self.MOST_OF_ERF)
        return self.number(self.rounded(numpy_library().erf(source)))

    def tanh(self, source: Array) -> Array:
        return self.logistic(source * 2) * 2 - 1

    def logistic(self, source: Array) -> Array:
        source = np.asarray(source).view(np.ndarray)
        self.require("arguments of logistic functions", source, -self.LOGITS, self.LOGITS)
        self.truncates(_squared_exponentials(-np.abs(source)) + 2 * crypten.LOGISTIC_ITERATIONS * source.size)
        return self.number(self.rounded(1 / (np.exp(-source) + 1)))

    def gelu(self, op: ops.Gelu, library: Any, weights: Weights, source: Array) -> Array:
        """Return GELU. The range of the tanh form is not checked, since this form is right for any input."""
        plain = source.view(np.ndarray)
        if op.form != "tanh":
            self.truncates(sum(_sum(plain**power) for power in (2, 3, 4, 6)))
            return super().gelu(op, library, weights, source)
        inner = (2 / np.pi) ** 0.5 * (plain + GELU_TANH_CUBIC * plain**3)
        steps = _squared_exponentials(-2 * np.abs(inner)) + 2 * crypten.LOGISTIC_ITERATIONS * plain.size
        self.truncates(steps + 2 * _sum(np.square(plain)) + 2 * _sum(inner))
        return self.number(self.product(FUNCTIONS[ops.Gelu](op, numpy_library(), weights, plain)))


def _sum(value: Array) -> float:
    return float(np.abs(value.view(np.ndarray)).sum())


def _squared_exponentials(exponents: Array) -> float:
    """Return the sum of the numbers that `crypten_arrays.exponential` squares, and of the last results."""
    power = np.exp(exponents / 2**crypten.EXPONENTIAL_SQUARINGS)
    total = _sum(power)
    for _ in range(crypten.EXPONENTIAL_SQUARINGS):
        power = np.square(power)
        total += _sum(power)
    return total


ARITHMETICS: dict[str, type[Arithmetic]] = {"spu": SpuArithmetic, "crypten": CryptenArithmetic}  # by engine


def arithmetic_of(protocol: str, setting: EngineSetting, **of: Any) -> Arithmetic:
    """Return the emulated fixed point of the engine of a protocol; `of` are further arguments of `Arithmetic`."""
    return ARITHMETICS[ENGINE_PROTOCOLS[protocol].engine](setting, **of)
