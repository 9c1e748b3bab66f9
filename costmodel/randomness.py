"""The correlated randomness that `semi2k` takes from a dealer: which an op uses up, and what it costs without a dealer.

Every correlation masks what the parties open to each other, so what an op's correlations mask is what `semi2k` sends.
Source: SecretFlow-SPU 0.9.5, libspu/mpc/semi2k/arithmetic.cc, boolean.cc and conversion.cc, calls of `beaver()`
(https://github.com/secretflow/spu).

What it costs to generate them without a dealer among the parties is in bytes, by formula. Nobody has measured it here:
the engine has none of these generators under `semi2k`. The sizes of ciphertexts and of batches of oblivious transfers
(OTs) are those measured of protocol `cheetah` on SecretFlow-SPU 0.9.5. The online phase stays what it is, so every
correlation is made as the engine consumes it, masks of full width included. Only bytes are priced: what the parties
compute meanwhile, which is much under encryption, is not in them.

Gilboa's product, of x held by one party and y by the other, modulo 2^k: an OT per bit of x, the i-th of which needs
the k - i lower bits of y alone; k OTs, k (k + 1) / 2 bits of messages. Source: Gilboa 1999, "Two Party RSA Key
Generation", section 4; Demmler, Schneider and Zohner 2015, ABY, section III-A (messages shortened bit by bit).
Random bits are chosen by the OTs themselves, so that no choice is sent.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from costmodel.network import Network
from costmodel.ops import Op
from costmodel.protocols import cheetah
from costmodel.protocols.cheetah_preprocessing import (
    BATCH,
    BATCH_BYTES,
    KEPT,
    TRIPLES,
    AmortisedPreprocessing,
    triple_batches,
)
from costmodel.protocols.op_programs import calls_of
from costmodel.protocols.primitives import Call, EngineSetting, halves, stored_bytes

# correlation -> what it is
#   product: a, b and ab of random numbers; square: a and a^2; matrix: A, B and AB
#   cross: ab, where each party knows one factor; and: products of bits; bit: a random bit as a number of the ring
Kind = Literal["product", "square", "matrix", "cross", "and", "bit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Correlated randomness of one kind.

    elements: of the result. bits: of each element of it; of `and` and `bit`, how many bits an element stands for.
    shape: rows, inner and columns of a matrix product; empty for the rest.
    """

    kind: Kind
    elements: int
    bits: int
    shape: tuple[int, ...] = ()


def correlations_of(op: Op, setting: EngineSetting) -> tuple[Correlation, ...]:
    """What one op uses up. Raises UserError for an op without a program."""
    calls = calls_of(op, setting, share_bytes=setting.ring_bits // 8)
    return tuple(correlation for call in calls for correlation in CORRELATIONS[call.primitive](call, setting))


def _full(kind: Kind) -> Callable[[Call, EngineSetting], tuple[Correlation, ...]]:
    """One that stands for numbers of the ring."""
    return lambda call, setting: (Correlation(kind=kind, elements=call.elements, bits=setting.ring_bits),)


def _matrix(call: Call, setting: EngineSetting) -> tuple[Correlation, ...]:
    rows, columns = call.factors
    shape = (rows, call.operands // (rows + columns), columns)
    return (Correlation(kind="matrix", elements=call.elements, bits=setting.ring_bits, shape=shape),)


def _wrap(call: Call, setting: EngineSetting) -> tuple[Correlation, ...]:
    return (Correlation(kind="cross", elements=call.elements, bits=8 * max(4, stored_bytes(call.bits))),)


def _carry(call: Call, setting: EngineSetting) -> tuple[Correlation, ...]:
    tree = [_ands(2 * call.elements, bits) for bits in halves(setting)]
    return (_ands(call.elements, setting.ring_bits), *tree)


def _adder(call: Call, setting: EngineSetting) -> tuple[Correlation, ...]:
    levels = (setting.ring_bits - 1).bit_length()
    return (_ands(call.elements, setting.ring_bits), *[_ands(2 * call.elements, setting.ring_bits)] * levels)


def _zero_test(call: Call, setting: EngineSetting) -> tuple[Correlation, ...]:
    """A mask in both kinds of shares, so bit by bit; ANDs of full words; and the way back to the ring."""
    mask = Correlation(kind="bit", elements=call.elements, bits=setting.ring_bits)
    return (mask, *[_ands(call.elements, setting.ring_bits)] * len(halves(setting)), mask)


def _ands(elements: int, bits: int) -> Correlation:
    return Correlation(kind="and", elements=elements, bits=bits)


# primitive -> what a call of it uses up
CORRELATIONS: dict[str, Callable[[Call, EngineSetting], tuple[Correlation, ...]]] = {
    "multiply": _full("product"),
    "square": _full("square"),
    "matmul": _matrix,
    "truncate": _wrap,
    "msb": _carry,
    "mux": _full("product"),
    "a2b": _adder,
    "b2a": lambda call, setting: (Correlation(kind="bit", elements=call.elements, bits=call.bits),),
    "equal": _zero_test,
    "and": lambda call, setting: (_ands(call.elements, call.bits),),
    **dict.fromkeys(("public_matmul", "share", "input"), lambda call, setting: ()),
}

# Bits on the wire per OT: a row of the extension matrix (Ishai et al. 2003, Extending OTs Efficiently; 128 bits of
# security), or a share of a batch that grows silently (Yang et al. 2020, Ferret, https://eprint.iacr.org/2020/924).
EXTENDED_OT_BITS = 128.0
SILENT_OT_BITS = 8 * BATCH_BYTES / (BATCH - KEPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrelationGenerator:
    """A way to make correlated randomness.

    bytes_of: sent for a correlation, in a ring of so many bits, all senders together. trusts: who must be trusted.
    source: of the formula.
    """

    name: str
    trusts: str
    source: str
    bytes_of: Callable[[Correlation, int], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorCost:
    """The cost for a whole model. network_s: of the bytes alone, one after the other, on full bandwidth."""

    generator: CorrelationGenerator
    setup_bytes: float
    network_s: float


def alternatives(some: Iterable[Op], setting: EngineSetting, link: Network) -> tuple[GeneratorCost, ...]:
    """Every generator's cost of all that some ops use up. Raises UserError for an op without a program."""
    correlations: dict[Correlation, int] = {}
    for op, count in Counter(some).items():
        for correlation in correlations_of(op, setting):
            correlations[correlation] = correlations.get(correlation, 0) + count
    costs = []
    for generator in GENERATORS:
        if generator.name == ENCRYPTED and setting.ring_bits != cheetah.RING_BITS:
            continue  # its ciphertexts are known for that ring alone
        sent = sum(
            count * generator.bytes_of(correlation, setting.ring_bits) for correlation, count in correlations.items()
        )
        costs.append(
            GeneratorCost(generator=generator, setup_bytes=sent, network_s=sent * 8 / link.bandwidth_bits_per_s)
        )
    return tuple(costs)


def _corrected(correlation: Correlation, ring_bits: int) -> float:
    """All shares grow from seeds but one party's share of the result, which the dealer sends it.

    A random bit is kept as a number of the ring, whose lowest bit it is.
    """
    num_bytes = correlation.bits * ring_bits / 8 if correlation.kind == "bit" else stored_bytes(correlation.bits)
    return correlation.elements * num_bytes


def _by_ots(correlation: Correlation, ring_bits: int, *, ot_bits: float) -> float:
    """From OTs of so many bits each."""
    return OT_BITS[correlation.kind](correlation, ring_bits, ot_bits) / 8


def _gilboa(bits: int, ot_bits: float, length: int = 1) -> float:
    """Bits of one number times a vector of so many that the other party holds."""
    return bits * ot_bits + length * bits * (bits + 1) / 2


def _matrix_bits(correlation: Correlation, ring_bits: int, ot_bits: float) -> float:
    """Two cross terms; in each, the bits of the factor that makes it cheaper choose rows or columns of the other.

    Source: Mohassel and Zhang 2017, SecureML, https://eprint.iacr.org/2017/396, section IV-F.
    """
    rows, inner, columns = correlation.shape
    left = rows * inner * _gilboa(correlation.bits, ot_bits, columns)
    return 2 * min(left, inner * columns * _gilboa(correlation.bits, ot_bits, rows))


# kind -> bits of (correlation, ring bits, bits of an OT)
OT_BITS: dict[str, Callable[[Correlation, int, float], float]] = {
    "product": lambda made, ring_bits, ot_bits: 2 * made.elements * _gilboa(made.bits, ot_bits),
    "square": lambda made, ring_bits, ot_bits: made.elements * _gilboa(made.bits, ot_bits),  # 2 a b of the shares
    "cross": lambda made, ring_bits, ot_bits: made.elements * _gilboa(made.bits, ot_bits),
    "matrix": _matrix_bits,
    # a random OT per direction and bit: Asharov et al. 2013, https://eprint.iacr.org/2013/552, section 5.1
    "and": lambda made, ring_bits, ot_bits: 2 * made.elements * made.bits * ot_bits,
    # the XOR of a bit of each party is their sum less twice their product: one OT of a number of the ring
    "bit": lambda made, ring_bits, ot_bits: made.elements * made.bits * (ot_bits + ring_bits),
}


def _encrypted(correlation: Correlation, ring_bits: int) -> float:
    """Products under lattice encryption, as those of `cheetah`; what is made of bits, from silent OTs.

    Source: Huang et al. 2022, Cheetah, https://eprint.iacr.org/2022/207, section 4, for matrices; Rathee et al. 2019,
    https://eprint.iacr.org/2019/577, for vectors of products; sizes as measured of the engine's own.
    """
    if correlation.kind == "matrix":
        rows, inner, columns = correlation.shape
        operands = inner * (rows + columns)
        call = Call(primitive="matmul", elements=correlation.elements, operands=operands, factors=(rows, columns))
        return cheetah.PRICES["matmul"](call, AmortisedPreprocessing()).online_bytes
    if correlation.kind in ("product", "square"):
        cross_terms = 2 if correlation.kind == "product" else 1
        return triple_batches(correlation.elements / TRIPLES).setup_bytes * cross_terms / 2
    return _by_ots(correlation, ring_bits, ot_bits=SILENT_OT_BITS)


ENCRYPTED = "lattice encryption and silent OT"

GENERATORS: tuple[CorrelationGenerator, ...] = (
    CorrelationGenerator(
        name="separate dealer, over the network",
        trusts="a dealer that takes no part",
        source="SecretFlow-SPU 0.9.5, libspu/mpc/semi2k/beaver/beaver_impl, TrustedThirdParty: corrections to a party",
        bytes_of=_corrected,
    ),
    CorrelationGenerator(
        name="OT extension",
        trusts="no third party",
        source="Gilboa 1999; Ishai et al. 2003; Mohassel and Zhang 2017",
        bytes_of=partial(_by_ots, ot_bits=EXTENDED_OT_BITS),
    ),
    CorrelationGenerator(
        name="silent OT",
        trusts="no third party",
        source="Gilboa 1999; Yang et al. 2020 (Ferret), bytes of a batch as the engine's",
        bytes_of=partial(_by_ots, ot_bits=SILENT_OT_BITS),
    ),
    CorrelationGenerator(
        name=ENCRYPTED,
        trusts="no third party",
        source="Huang et al. 2022 (Cheetah), ciphertexts as measured; Yang et al. 2020 (Ferret)",
        bytes_of=_encrypted,
    ),
)
