"""The cost of making the correlated randomness of `semi2k` in other ways than by the first party, its usual dealer.

`costmodel/protocols/semi2k.py` states the correlations that an op consumes. The bytes that make them follow from
formulas and are not measured. Of the ways in `GENERATORS`, the engine has only the separate dealer. The sizes of
ciphertexts and of batches of oblivious transfers (OTs) are those measured for `cheetah` on SecretFlow-SPU 0.9.5. Every
correlation is made as the engine consumes it, with masks of full width. Computing, considerable under encryption, is
not included.

By Gilboa's method, the product of x, held by one party, and y, held by the other, modulo 2^k takes an OT per bit of x;
that of bit i, counted from 0, needs only the k - i lower bits of y. These are k OTs with k (k + 1) / 2 bits of
messages. The bits of x are random, so no choice is sent. Source: Gilboa 1999, "Two Party RSA Key Generation", section
4; Demmler, Schneider and Zohner 2015, ABY, section III-A (messages shortened bit by bit).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from costmodel.network import Network
from costmodel.ops import Op
from costmodel.protocols import cheetah
from costmodel.protocols.cheetah_preprocessing import BATCH, BATCH_BYTES, KEPT, TRIPLES, Use, triple_batches
from costmodel.protocols.primitives import Call, EngineSetting, stored_bytes
from costmodel.protocols.semi2k import Correlation, correlations_of

# Bits on the wire per OT: a row of the extension matrix (Ishai et al. 2003, Extending OTs Efficiently; 128 bits of
# security), or a share of a batch that grows silently (Yang et al. 2020, Ferret, https://eprint.iacr.org/2020/924).
EXTENDED_OT_BITS = 128.0
SILENT_OT_BITS = 8 * BATCH_BYTES / (BATCH - KEPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrelationGenerator:
    """A way to make correlated randomness.

    trusts: the third party that must be trusted, in words. source: source of the formula.
    bytes_of: (correlation, bits of the ring) -> bytes that all parties, or a separate dealer, send to make it.
    """

    name: str
    trusts: str
    source: str
    bytes_of: Callable[[Correlation, int], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorCost:
    """The bytes that a generator sends for a whole model, and the seconds to send all of them, without rounds."""

    generator: CorrelationGenerator
    setup_bytes: float
    network_s: float


def alternatives(some: Iterable[Op], setting: EngineSetting, link: Network) -> tuple[GeneratorCost, ...]:
    """Return the cost of each of `GENERATORS` for a model's ops; that by encryption is only for rings of 64 bits.

    A UserError is raised for an op that semi2k has no formula for.
    """
    correlations: dict[Correlation, int] = {}
    for op, count in Counter(some).items():
        for correlation in correlations_of(op, setting):
            correlations[correlation] = correlations.get(correlation, 0) + count
    costs = []
    for generator in GENERATORS:
        if generator.name == ENCRYPTED and setting.ring_bits != cheetah.RING_BITS:
            continue  # its ciphertexts are only known for that ring
        sent = sum(count * generator.bytes_of(one, setting.ring_bits) for one, count in correlations.items())
        network_s = sent * 8 / link.bandwidth_bits_per_s
        costs.append(GeneratorCost(generator=generator, setup_bytes=sent, network_s=network_s))
    return tuple(costs)


def _corrected(correlation: Correlation, ring_bits: int) -> float:
    """Return the bytes of one party's share of the result, which the dealer sends; other shares grow from seeds."""
    num_bytes = correlation.bits * ring_bits / 8 if correlation.kind == "bit" else stored_bytes(correlation.bits)
    return correlation.elements * num_bytes


def _by_ots(correlation: Correlation, ring_bits: int, *, ot_bits: float) -> float:
    return OT_BITS[correlation.kind](correlation, ring_bits, ot_bits) / 8


def _gilboa(bits: int, ot_bits: float, length: int = 1) -> float:
    return bits * ot_bits + length * bits * (bits + 1) / 2


def _matrix_bits(correlation: Correlation, ring_bits: int, ot_bits: float) -> float:
    """Return the bits of two cross terms; in each, the bits of the cheaper factor choose rows or columns of the other.

    Source: Mohassel and Zhang 2017, SecureML, https://eprint.iacr.org/2017/396, section IV-F.
    """
    rows, inner, columns = correlation.shape
    left = rows * inner * _gilboa(correlation.bits, ot_bits, columns)
    return 2 * min(left, inner * columns * _gilboa(correlation.bits, ot_bits, rows))


# kind of correlation -> function of correlation, bits of the ring and bits on the wire per OT, that returns bits sent
OT_BITS: dict[str, Callable[[Correlation, int, float], float]] = {
    "product": lambda made, ring_bits, ot_bits: 2 * made.elements * _gilboa(made.bits, ot_bits),
    "square": lambda made, ring_bits, ot_bits: made.elements * _gilboa(made.bits, ot_bits),  # 2 a b of the shares
    "cross": lambda made, ring_bits, ot_bits: made.elements * _gilboa(made.bits, ot_bits),
    "matrix": _matrix_bits,
    # a random OT per direction and bit: Asharov et al. 2013, https://eprint.iacr.org/2013/552, section 5.1
    "and": lambda made, ring_bits, ot_bits: 2 * made.elements * made.bits * ot_bits,
    # the XOR of two bits is their sum minus twice their product: one OT of a number of the ring
    "bit": lambda made, ring_bits, ot_bits: made.elements * made.bits * (ot_bits + ring_bits),
}


def _encrypted(correlation: Correlation, ring_bits: int) -> float:
    """Return the bytes of matrices, products and squares under encryption, as in `cheetah`; others use silent OTs."""
    if correlation.kind == "matrix":
        rows, inner, columns = correlation.shape
        operands = inner * (rows + columns)
        call = Call(primitive="matmul", elements=correlation.elements, operands=operands, factors=(rows, columns))
        return cheetah.PRICES["matmul"](call, Use()).online_bytes
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
