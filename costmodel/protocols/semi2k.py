"""The protocol `semi2k`: two parties, additive shares modulo 2^k, correlated randomness from a dealer; semi-honest.

Bytes are what the two parties send each other. The dealer's traffic is not in them: the engine's default dealer is
its first party, which expands seeds exchanged once at start-up, so that no call has preprocessing bytes. That party
could unmask what the other hides, so a price without preprocessing assumes a dealer whom both trust. To have none is
priced in `costmodel/randomness.py`: the corrections of a separate dealer, or what the parties make themselves.
The engine has no products with a factor that one party holds: it shares the factor first, which is local.

Source of every formula: SecretFlow-SPU 0.9.5, libspu/mpc/semi2k and libspu/mpc/ab_api.cc
(https://github.com/secretflow/spu); Cramer et al. 2018, SPDZ2k, for the products.
"""

from collections.abc import Callable
from dataclasses import replace

from costmodel.ops import Op
from costmodel.protocols.op_programs import calls_of
from costmodel.protocols.primitives import (
    Call,
    Comm,
    EngineSetting,
    halves,
    local,
    price_calls,
    stored_bytes,
    total_comm,
)

NUM_PARTIES = 2


def comm(op: Op, setting: EngineSetting) -> Comm:
    """Rounds, messages and bytes of one op. Raises UserError for an op without a program."""
    return price_calls(calls_of(op, setting, share_bytes=setting.ring_bits // 8), setting, PRICES)


def _opened(num_bytes: int) -> Comm:
    """Both parties send each other their share of a masked value, at once."""
    return Comm(rounds=1, messages=NUM_PARTIES, online_bytes=NUM_PARTIES * num_bytes, waited_bytes=num_bytes)


def _multiply(call: Call, setting: EngineSetting) -> Comm:
    """Beaver: x - a and y - b are opened together. Source: arithmetic.cc, MulAA and MulA1B."""
    return _opened(2 * call.elements * setting.ring_bits // 8)


def _square(call: Call, setting: EngineSetting) -> Comm:
    """x - a is opened, with a pair a, a^2 from the dealer. Source: arithmetic.cc, SquareA."""
    return _opened(call.elements * setting.ring_bits // 8)


def _matmul(call: Call, setting: EngineSetting) -> Comm:
    """Beaver: both masked factors are opened, whatever the result's size; a weight but once, if its mask is kept.

    Source: arithmetic.cc, MatMulAA and MulOpen, and beaver_cache.h.
    """
    rows, columns = call.factors
    elements = call.operands * rows // (rows + columns) if call.opened else call.operands
    return _opened(elements * setting.ring_bits // 8)


def _truncate(call: Call, setting: EngineSetting) -> Comm:
    """The wrap bit is a product of one bit of each party, in the least ring that holds the cut bits; |x| < 2^(k-2).

    Source: arithmetic.cc, TruncAPr2 and MulVVS.
    """
    return _opened(call.elements * max(4, stored_bytes(call.bits)))


def _and_call(call: Call, setting: EngineSetting) -> Comm:
    """Beaver on bits. Source: boolean.cc, AndBB."""
    return _opened(2 * call.elements * stored_bytes(call.bits))


def _msb(call: Call, setting: EngineSetting) -> Comm:
    """The carry into the highest bit of the sum of both shares, by a tree of generate and propagate pairs.

    An AND of all bits, then per level two ANDs of half as many, opened together. Source: conversion.cc, MsbA2B;
    ab_api.cc, carry_a2b.
    """
    return total_comm(
        [_and(call.elements, setting.ring_bits), *(_and(2 * call.elements, bits) for bits in halves(setting))]
    )


def _a2b(call: Call, setting: EngineSetting) -> Comm:
    """All bits of the sum of both shares by a Kogge-Stone adder: an AND, then two at a time for every doubling.

    Source: conversion.cc, A2B; ab_api.cc, ppa_kogge_stone.
    """
    levels = (setting.ring_bits - 1).bit_length()
    return total_comm([_and(call.elements, setting.ring_bits), *[_and(2 * call.elements, setting.ring_bits)] * levels])


def _b2a(call: Call, setting: EngineSetting) -> Comm:
    """Bits masked by random bits from the dealer are opened. Source: conversion.cc, B2A_Randbit."""
    return _opened(call.elements * stored_bytes(call.bits))


def _equal(call: Call, setting: EngineSetting) -> Comm:
    """A masked difference is opened and its bits joined by halves, all in full words; then to arithmetic, likewise.

    Source: conversion.cc, EqualAP and eqz, https://eprint.iacr.org/2019/599, section IV.D.
    """
    joined = [_and(call.elements, setting.ring_bits)] * len(halves(setting))
    opened = _opened(call.elements * setting.ring_bits // 8)
    return total_comm([opened, *joined, _b2a(replace(call, bits=setting.ring_bits), setting)])


def _and(elements: int, bits: int) -> Comm:
    return _opened(2 * elements * stored_bytes(bits))


PRICES: dict[str, Callable[[Call, EngineSetting], Comm]] = {
    "multiply": _multiply,
    "square": _square,
    "matmul": _matmul,
    "public_matmul": local,  # arithmetic.cc, MatMulAP
    "truncate": _truncate,
    "msb": _msb,
    "mux": _multiply,
    "a2b": _a2b,
    "b2a": _b2a,
    "equal": _equal,
    "and": _and_call,
    "share": local,  # both parties expand a common seed; arithmetic.cc, P2A and V2A
    "input": local,
}
