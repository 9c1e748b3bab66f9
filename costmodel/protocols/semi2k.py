"""The protocol `semi2k`: two parties, additive shares modulo 2^k, correlated randomness from a dealer; semi-honest.

A call consumes correlations (correlated randomness) one after the other. Each correlation masks numbers that both
parties open to each other at once, so it takes one round and only the masked numbers are sent. Bytes are those that the
two parties send each other. If one party holds a factor of a product, the engine shares it first, which is local.

No call has preprocessing bytes: the engine's default dealer is its first party, which expands seeds that are exchanged
once at start-up. That party could unmask what the other hides, so both must trust it. `costmodel/randomness.py` prices
the alternatives: a separate dealer, or randomness that the parties make themselves.

Source of every formula: SecretFlow-SPU 0.9.5, libspu/mpc/semi2k, its calls of `beaver()`, and libspu/mpc/ab_api.cc
(https://github.com/secretflow/spu); Cramer et al. 2018, SPDZ2k, for the products.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from costmodel.ops import Op
from costmodel.protocols.op_programs import calls_of
from costmodel.protocols.primitives import Call, Comm, EngineSetting, halves, price_calls, stored_bytes

NUM_PARTIES = 2

# correlation: its random numbers
#   product: a, b and ab of random numbers; square: a and a^2; matrix: A, B and AB
#   cross: ab, where each party knows one factor; and: products of bits; bit: a random bit as a number of the ring
Kind = Literal["product", "square", "matrix", "cross", "and", "bit"]
# kind -> masked numbers that each party opens per element of the result; for `matrix` they depend on the shape
MASKS: dict[Kind, int] = {"product": 2, "and": 2, "square": 1, "cross": 1, "bit": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Correlated randomness of one kind.

    elements: Number of elements of the result of the step that consumes the randomness.
    bits: Bits of each element; an element of `and` or `bit` consists of `bits` correlations of single bits.
    shape: Rows, inner dimension and columns of a matrix product; empty for other kinds.
    opened: Whether the right factor of a `matrix` was opened in an earlier run; its mask is generated all the same.
    """

    kind: Kind
    elements: int
    bits: int
    shape: tuple[int, ...] = ()
    opened: bool = field(default=False, compare=False)

    @property
    def masked_bytes(self) -> int:
        """Bytes of masked numbers that each party sends when it consumes the correlation."""
        if self.kind != "matrix":
            return MASKS[self.kind] * self.elements * stored_bytes(self.bits)
        rows, inner, columns = self.shape
        return inner * (rows + (0 if self.opened else columns)) * self.bits // 8


Correlations: TypeAlias = tuple[Correlation, ...]


def comm(op: Op, setting: EngineSetting) -> Comm:
    """Return the rounds, messages and bytes of one op; errors are those of `calls_of`."""
    return price_calls(calls_of(op, setting, share_bytes=setting.ring_bits // 8), setting, PRICES)


def correlations_of(op: Op, setting: EngineSetting) -> Correlations:
    """Return the correlations that one op consumes, in order; errors are those of `calls_of`."""
    calls = calls_of(op, setting, share_bytes=setting.ring_bits // 8)
    return tuple(correlation for call in calls for correlation in CORRELATIONS[call.primitive](call, setting))


def _words(kind: Kind, call: Call, setting: EngineSetting) -> Correlations:
    """Return one correlation of numbers of the ring. Source: arithmetic.cc, MulAA, MulA1B and SquareA."""
    return (Correlation(kind=kind, elements=call.elements, bits=setting.ring_bits),)


def _matrix(call: Call, setting: EngineSetting) -> Correlations:
    """Open both masked factors; a weight only once if its mask is reused. Source: MatMulAA and MatMulOpen."""
    rows, columns = call.factors
    shape, bits = (rows, call.operands // (rows + columns), columns), setting.ring_bits
    return (Correlation(kind="matrix", elements=call.elements, bits=bits, shape=shape, opened=call.opened),)


def _adder(call: Call, setting: EngineSetting) -> Correlations:
    """Add shares by a Kogge-Stone adder: one AND, then two per doubling. Source: ab_api.cc, ppa_kogge_stone."""
    levels = (setting.ring_bits - 1).bit_length()
    return (_and(call.elements, setting.ring_bits), *[_and(2 * call.elements, setting.ring_bits)] * levels)


def _zero_test(call: Call, setting: EngineSetting) -> Correlations:
    """Open a masked difference, combine its bits by halving, convert. Source: conversion.cc, EqualAP and eqz."""
    mask = Correlation(kind="bit", elements=call.elements, bits=setting.ring_bits)
    return (mask, *[_and(call.elements, setting.ring_bits)] * len(halves(setting)), mask)


def _and(elements: int, bits: int) -> Correlation:
    """Return the correlation of an AND of `bits` bits per element. Source: boolean.cc, AndBB."""
    return Correlation(kind="and", elements=elements, bits=bits)


# primitive -> the correlations that a call consumes
CORRELATIONS: Mapping[str, Callable[[Call, EngineSetting], Correlations]] = {
    "multiply": partial(_words, "product"),
    "square": partial(_words, "square"),
    "matmul": _matrix,
    # one bit of each party is multiplied, in the smallest ring that holds the cut bits; TruncAPr2 and MulVVS
    "truncate": lambda call, setting: (
        Correlation(kind="cross", elements=call.elements, bits=8 * max(4, stored_bytes(call.bits))),
    ),
    # the carry into the highest bit, by a tree: one AND, then two per level; ab_api.cc, carry_a2b
    "msb": lambda call, setting: (
        _and(call.elements, setting.ring_bits),
        *(_and(2 * call.elements, bits) for bits in halves(setting)),
    ),
    "mux": partial(_words, "product"),
    "a2b": _adder,
    # bits are masked by random bits; conversion.cc, B2A_Randbit
    "b2a": lambda call, setting: (Correlation(kind="bit", elements=call.elements, bits=call.bits),),
    "equal": _zero_test,
    "and": lambda call, setting: (_and(call.elements, call.bits),),
    # local: arithmetic.cc, MatMulAP; in P2A and V2A both parties expand a common seed
    **dict.fromkeys(("public_matmul", "share", "input"), lambda call, setting: ()),
}


def _opened(used: Callable[[Call, EngineSetting], Correlations], call: Call, setting: EngineSetting) -> Comm:
    sent = [correlation.masked_bytes for correlation in used(call, setting)]
    rounds, total = len(sent), sum(sent)
    return Comm(rounds=rounds, messages=NUM_PARTIES * rounds, online_bytes=NUM_PARTIES * total, waited_bytes=total)


PRICES: dict[str, Callable[[Call, EngineSetting], Comm]] = {
    primitive: partial(_opened, used) for primitive, used in CORRELATIONS.items()
}
