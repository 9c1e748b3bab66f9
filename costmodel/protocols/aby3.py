"""The protocol `aby3`: three parties, replicated shares modulo 2^k; semi-honest, honest majority, no preprocessing.

Source of every formula: SecretFlow-SPU 0.9.5, libspu/mpc/aby3 and libspu/mpc/ab_api.cc
(https://github.com/secretflow/spu); Mohassel and Rindal 2018, ABY3, https://eprint.iacr.org/2018/403.
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

NUM_PARTIES = 3
OBLIVIOUS_BITS = 8  # conversion.cc, B2ASelector: up to 8 bits by oblivious transfer (OT), more bits by an adder


def comm(op: Op, setting: EngineSetting) -> Comm:
    """Return the rounds, messages and bytes of one op; errors are those of `calls_of`."""
    return price_calls(calls_of(op, setting, share_bytes=2 * setting.ring_bits // 8), setting, PRICES)


def _passed_on(num_bytes: int) -> Comm:
    return Comm(rounds=1, messages=NUM_PARTIES, online_bytes=NUM_PARTIES * num_bytes, waited_bytes=num_bytes)


def _product(call: Call, setting: EngineSetting) -> Comm:
    """Each party computes one part and re-shares it. Source: arithmetic.cc, MulAA and MatMulAA; ABY3 section 5.1."""
    return _passed_on(call.elements * setting.ring_bits // 8)


def _multiply(call: Call, setting: EngineSetting) -> Comm:
    """If one party holds a factor, it is shared first. Source: api.cc, mul_sv."""
    return total_comm([*([_shared(call.elements, setting)] if call.private else []), _product(call, setting)])


def _matmul(call: Call, setting: EngineSetting) -> Comm:
    """Like `_multiply`. Source: api.cc, mmul_sv."""
    rows, columns = call.factors
    right = call.operands // (rows + columns) * columns
    return total_comm([*([_shared(right, setting)] if call.private else []), _product(call, setting)])


def _truncate(call: Call, setting: EngineSetting) -> Comm:
    """Compute the wrap bit with the third party's help, re-share; |x| < 2^(k-2). Source: arithmetic.cc, TruncAPr2."""
    # first two masked bits and the helper's correction, in the smallest ring that holds the cut bits, then two words
    wrap, word = max(4, stored_bytes(call.bits)), setting.ring_bits // 8
    sent, waited = call.elements * (3 * wrap + 2 * word), call.elements * (wrap + word)
    return Comm(rounds=2, messages=5, online_bytes=sent, waited_bytes=waited)


def _mux(call: Call, setting: EngineSetting) -> Comm:
    """Two oblivious transfers; each result is passed on. Source: arithmetic.cc, MulA1B; ot.cc; ABY3 section 5.4.1."""
    num_bytes = call.elements * setting.ring_bits // 8  # waited: two messages on one link, then the result
    return Comm(rounds=2, messages=8, online_bytes=8 * num_bytes, waited_bytes=3 * num_bytes)


def _msb(call: Call, setting: EngineSetting) -> Comm:
    """Share a sum of two parts as bits, one AND, two ANDs per level. Source: MsbA2B; ab_api.cc, carry_a2b."""
    share, generate = _and(call.elements, setting.ring_bits), _and(call.elements, setting.ring_bits)
    return total_comm([share, generate, *(_and(2 * call.elements, bits) for bits in halves(setting))])


def _b2a(call: Call, setting: EngineSetting) -> Comm:
    """Convert few bits by OT, more by an adder. Source: conversion.cc, B2AByOT and B2AByPPA; ABY3 section 5.4."""
    word = setting.ring_bits // 8
    if call.bits <= OBLIVIOUS_BITS:  # per bit three messages of a word, then the chosen sum goes back
        sent, waited = call.elements * word * (3 * call.bits + 1), call.elements * word * (2 * call.bits + 1)
        return Comm(rounds=2, messages=4, online_bytes=sent, waited_bytes=waited)
    # a random number becomes boolean shares and is added; one part of the sum is opened to one party, which re-shares
    share, reshare = _passed_on(call.elements * word), _passed_on(call.elements * word)
    opened = Comm(rounds=1, messages=1, online_bytes=call.elements * word, waited_bytes=call.elements * word)
    return total_comm([share, _adder(call.elements, setting), opened, reshare])


def _equal(call: Call, setting: EngineSetting) -> Comm:
    """Open a masked difference, combine its bits by halving, convert. Source: conversion.cc, EqualAP and eqz."""
    num_bytes = 4 * call.elements * setting.ring_bits // 8  # the mask in two sharings, a masked share, a re-sharing
    opened = Comm(rounds=3, messages=4, online_bytes=num_bytes, waited_bytes=num_bytes)
    joined = [_and(call.elements, bits) for bits in halves(setting)]
    return total_comm([opened, *joined, _b2a(replace(call, bits=OBLIVIOUS_BITS), setting)])


def _shared(elements: int, setting: EngineSetting) -> Comm:
    """The owner sends a part to each other party at once. Source: arithmetic.cc, V2A."""
    num_bytes = elements * setting.ring_bits // 8
    return Comm(rounds=1, messages=2, online_bytes=2 * num_bytes, waited_bytes=num_bytes)


def _adder(elements: int, setting: EngineSetting) -> Comm:
    levels = (setting.ring_bits - 1).bit_length()
    return total_comm([_and(elements, setting.ring_bits), *[_and(2 * elements, setting.ring_bits)] * levels])


def _and(elements: int, bits: int) -> Comm:
    """Compute and re-share like `_product`, in the bytes that store `bits` bits. Source: boolean.cc, AndBB."""
    return _passed_on(elements * stored_bytes(bits))


PRICES: dict[str, Callable[[Call, EngineSetting], Comm]] = {
    "multiply": _multiply,
    "square": _product,
    "matmul": _matmul,
    "public_matmul": local,  # arithmetic.cc, MatMulAP
    "truncate": _truncate,
    "msb": _msb,
    "mux": _mux,
    # like `_msb`, with a Kogge-Stone adder; conversion.cc, A2B; ab_api.cc, ppa_kogge_stone
    "a2b": lambda call, setting: total_comm([_and(call.elements, setting.ring_bits), _adder(call.elements, setting)]),
    "b2a": _b2a,
    "equal": _equal,
    "and": lambda call, setting: _and(call.elements, call.bits),
    "share": _product,  # parts of a sharing of zero, which hides the public number, are passed on; arithmetic.cc, P2A
    "input": lambda call, setting: _shared(call.elements, setting),
}
