"""Calls of primitives that compute an elementary function of one secret fixed-point number, as the engine does.

Source of every sequence: SecretFlow-SPU 0.9.5 (https://github.com/secretflow/spu), files named below, under the default
runtime options of that version: exponential by 8 squarings, division by 2 of Goldschmidt's iterations (3 from 30
fraction bits on), tanh by Chebyshev polynomials, erf by Abramowitz and Stegun 7.1.27. Tests compare bytes with measured
ones. Other operations are local: sums, products with public integers, shifts and masks of boolean sharings. In a ring
of 32 bits, every function that needs `highest_bit` raises a UserError.
"""

from math import ceil, log2

from costmodel.errors import UserError
from costmodel.ops import Op
from costmodel.protocols.primitives import Call, Calls, EngineSetting, on

EXPONENTIAL_SQUARINGS = 8  # (1 + x / 2^8)^(2^8); spu.proto, fxp_exp_iters
DIVISION_ITERATIONS = 2  # spu.proto, fxp_div_goldschmidt_iters
DIVISION_ITERATIONS_FINE = 3  # fxp_base.cc: at least 3 from 30 fraction bits on
FINE_FRACTION_BITS = 30
CHEBYSHEV_TERMS = 9  # fxp_approx.cc, tanh_chebyshev
RSQRT_DEGREE = 4  # fxp_approx.cc, rsqrt_init_guess
NARROWEST_DIVISION_BITS = 64
ERF_DEGREE = 4  # fxp_approx.cc, ErfImpl
VERY_SMALL_UNITS = 4  # constants below this many units of the last fraction bit are enlarged by `constant_product`

MULTIPLY: Calls = (Call(primitive="multiply", elements=1),)
SIGN: Calls = (Call(primitive="msb", elements=1),)
SELECT: Calls = (Call(primitive="mux", elements=1),)
EQUAL: Calls = (Call(primitive="equal", elements=1),)
MAXIMUM = SIGN + SELECT  # of two numbers, by the sign of their difference


def truncate(setting: EngineSetting) -> Calls:
    """Return the calls that truncate a product to `fraction_bits`; a product with a public number needs no others."""
    return (Call(primitive="truncate", elements=1, bits=setting.fraction_bits),)


def product(setting: EngineSetting) -> Calls:
    """Return the calls that multiply two secrets and truncate the product."""
    return MULTIPLY + truncate(setting)


def weight_product(op: Op, setting: EngineSetting) -> Calls:
    """Return the calls that multiply a secret by a weight of `op`, which is public, secret-shared or the server's."""
    if op.public:
        return truncate(setting)
    return (Call(primitive="multiply", elements=1, private=setting.weights == "server"), *truncate(setting))


def weight_sum(op: Op, setting: EngineSetting) -> Calls:
    """Return the calls that add a weight of `op` to a secret: one if the server must first share the weight, else none.

    Source: api.cc, add_sv.
    """
    return (Call(primitive="input", elements=1),) if setting.weights == "server" and not op.public else ()


def constant_product(factor: float, setting: EngineSetting) -> Calls:
    """Return the calls that multiply by a constant: none for 1, and a wider truncation for a very small constant.

    If the constant's absolute value c is below 4 units of the last fraction bit, the engine multiplies by 2^k times the
    constant and truncates k bits more; 2^k is the greatest power of two less than 1 / c. Source: SecretFlow-SPU,
    libspu/dialect/ring, ImproveMulSmallConstant. We measured that 0.9.5 does the same below the limit, but not at it.
    """
    if factor == 1:
        return ()
    if abs(factor) >= VERY_SMALL_UNITS * 2.0**-setting.fraction_bits:
        return truncate(setting)
    extra_bits = ceil(log2(1 / abs(factor))) - 1
    return (Call(primitive="truncate", elements=1, bits=setting.fraction_bits + extra_bits),)


def square(setting: EngineSetting) -> Calls:
    """Return the calls that square a secret and truncate the square."""
    return (Call(primitive="square", elements=1), *truncate(setting))


def exponential(setting: EngineSetting) -> Calls:
    """Return the calls that compute exp(x) as (1 + x / 2^8)^(2^8). Source: fxp_approx.cc, exp_taylor."""
    shrink = Call(primitive="truncate", elements=1, bits=EXPONENTIAL_SQUARINGS)
    return (shrink, *square(setting) * EXPONENTIAL_SQUARINGS)


def reciprocal(setting: EngineSetting) -> Calls:
    """Return the calls that compute 1 / x: remove the sign, apply `reciprocal_positive` and restore the sign.

    Source: fxp_base.cc, reciprocal_goldschmidt.
    """
    return SIGN + _arithmetic(1) + MULTIPLY + reciprocal_positive(setting) + MULTIPLY


def reciprocal_positive(setting: EngineSetting) -> Calls:
    """Return the calls that compute 1 / x for x > 0: scale to [1/2, 1), iterate as Goldschmidt, and scale back.

    Source: fxp_base.cc, reciprocal_goldschmidt_positive and reciprocal_goldschmidt_normalized_approx.
    """
    fine = setting.fraction_bits >= FINE_FRACTION_BITS
    iterations = DIVISION_ITERATIONS_FINE if fine else DIVISION_ITERATIONS
    refine = product(setting) + square(setting)
    approximate = product(setting) * 2 + refine * (iterations - 1) + product(setting)
    return highest_bit(setting) + _arithmetic(2 * setting.fraction_bits) + approximate + product(setting)


def reciprocal_square_root(setting: EngineSetting) -> Calls:
    """Return the calls that compute 1 / sqrt(x): a polynomial of x scaled to [1/4, 1/2), times a power of sqrt(2).

    Source: fxp_approx.cc, f_rsqrt.
    """
    fraction = setting.fraction_bits
    normalise = _arithmetic(2 * fraction) + product(setting)
    guess = polynomial(RSQRT_DEGREE, setting)
    compensate = _arithmetic(1) + _arithmetic(fraction // 2 * 2) + MULTIPLY
    return highest_bit(setting) + normalise + guess + compensate + product(setting)


def tanh(setting: EngineSetting) -> Calls:
    """Return the calls that compute tanh: clamp to [-5, 5], scale, and sum weighted Chebyshev polynomials.

    Source: fxp_approx.cc, tanh_chebyshev.
    """
    clamp = MAXIMUM * 2
    terms = square(setting) + product(setting) * (CHEBYSHEV_TERMS - 1)
    return clamp + truncate(setting) + terms + truncate(setting)


def sigmoid(setting: EngineSetting) -> Calls:
    """Return the calls that compute 1 / (1 + exp(-x)). Source: fxp_approx.cc, sigmoid_real, the engine's default."""
    return exponential(setting) + reciprocal(setting)


def error_function(setting: EngineSetting) -> Calls:
    """Return the calls for erf: the sign of x times 1 or, if |x| < 3, 1 - 1 / p(|x|)^4, where p has degree 4.

    Source: fxp_approx.cc, f_erf.
    """
    absolute = SIGN + _arithmetic(1) + MULTIPLY
    fourth_power = square(setting) * 2
    inner = polynomial(ERF_DEGREE, setting) + fourth_power + reciprocal_positive(setting)
    return SIGN + absolute + SIGN + inner + SELECT * 2


def polynomial(degree: int, setting: EngineSetting) -> Calls:
    """Return the calls that compute a polynomial of `degree` with public coefficients; the sum is truncated once.

    Source: fxp_base.cc, polynomial.
    """
    powers: Calls = ()
    known = 1
    while known < degree:
        new = min(known, degree - known)  # number of powers that one call computes
        powers += on(new, product(setting))
        known += new
    return powers + truncate(setting)


def highest_bit(setting: EngineSetting) -> Calls:
    """Return the calls that keep only the highest set bit of a number, by ORing each bit with all bits above it.

    A UserError is raised for a ring of 32 bits, in which the engine cannot divide. Source: ring.cc, _prefix_or.
    """
    if setting.ring_bits < NARROWEST_DIVISION_BITS:
        raise UserError(
            f"`ring_bits` must be at least {NARROWEST_DIVISION_BITS} for division, square root and erf, "
            f"but got {setting.ring_bits}."
        )
    offsets = (1 << level for level in range((setting.ring_bits - 1).bit_length()))
    ors = [Call(primitive="and", elements=1, bits=setting.ring_bits - offset) for offset in offsets]
    return (Call(primitive="a2b", elements=1), *ors)


def _arithmetic(bits: int) -> Calls:
    return (Call(primitive="b2a", elements=1, bits=bits),)


def reduction(length: int, function: Calls) -> Calls:
    """Return the calls that combine `length` elements by a tree; `function`: the calls that combine two elements.

    At a level of odd length the last element is left over, and combined at the end. Source: hlo/reduce.cc, TreeReduce.
    """
    calls: Calls = ()
    num_waiting = 0
    while length > 1:
        calls += on(length // 2, function)
        num_waiting += length % 2
        length //= 2
    return calls + function * num_waiting
