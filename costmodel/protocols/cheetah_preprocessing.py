"""The preprocessing of `cheetah`: keys, oblivious transfers (OTs) and product triples, made before they are needed.

A `Use` counts what calls consume. A `Stock` makes more when it runs out, as the engine does, so the cost of an op
depends on the ops before it. `Use.share` costs only the consumed part of each batch, so that costs add up in any order.
Nothing here depends on the inputs of the model.

Source: SecretFlow-SPU 0.9.5, libspu/mpc/cheetah (https://github.com/secretflow/spu), with one thread. Sizes of keys and
compressed ciphertexts, and the cost of the first OTs, are measured in a ring of 64 bits, as sums over both parties.
"""

from dataclasses import dataclass, field
from math import ceil

from costmodel.protocols.primitives import Comm, total_comm

NUM_PARTIES = 2
DEGREE = 8192  # coefficients of a ring element of the encryption; arith/cheetah_mul.cc, arith/cheetah_dot.cc
NUM_MODULI = 4  # plaintext primes of 45 bits for 64 + 64 + 32 bits; arith/cheetah_mul.cc, TotalCRTBitLen
PRODUCT_SENT_BYTES = 161_025  # an encrypted vector, one prime; measured on products of 16,384 elements
PRODUCT_ANSWER_BYTES = 124_947  # its answer; measured on the same products
PRODUCT_KEYS_BYTES = 321_746  # both public keys; measured on a first product
MATRIX_KEYS_BYTES = 19_428_501  # both public keys and keys for packing; measured on a first matrix product

# OT extension by Ferret: n in a batch, of which k + t log2(n / t) make the next one; ot/yacl/yacl_ote_adapter.h
BATCH, KEPT = 10_485_760, 452_000 + 1280 * 13
FIRST_BATCH = 470_016
BATCH_BYTES = 1280 * 13 * 16 + 19  # t trees of log2(n / t) levels, a block each; the 19 are measured
START_BYTES = 940_326  # base OTs and first batches, both directions; measured on a first comparison
BATCH_MESSAGES, START_MESSAGES = 1281, 1858  # measured on a first comparison
TRIPLES = DEGREE // 2  # made from one vector of each prime; state.cc, makeSureCacheSize


def made_ahead(num_bytes: int, num_messages: int) -> Comm:
    """Return the cost of preprocessing with these bytes and messages, both summed over the parties; rounds are 0.

    No two steps overlap: keys are received before they are answered, and triples and OTs are made by one party sending
    and the other answering, so all bytes are waited for. On a link of 3 Mbit/s, products from triples took 0.97 of the
    time that all bytes need. Source: arith/cheetah_mul.cc, LazyExpandSEALContexts; state.cc, makeSureCacheSize.
    """
    return Comm(rounds=0, messages=num_messages, online_bytes=0, setup_bytes=num_bytes, waited_bytes=num_bytes)


PRODUCT_KEYS = made_ahead(PRODUCT_KEYS_BYTES, 2)
MATRIX_KEYS = made_ahead(MATRIX_KEYS_BYTES, 4)
OT_START = made_ahead(START_BYTES, START_MESSAGES)


def ot_batches(count: float) -> Comm:
    """Return the cost of `count` batches of OTs in one direction; bytes and messages of a fraction are rounded."""
    return made_ahead(round(count * BATCH_BYTES), round(count * BATCH_MESSAGES))


def triple_batches(count: float) -> Comm:
    """Return the cost of `count` batches of TRIPLES product triples; bytes and messages of a fraction are rounded."""
    vectors = NUM_MODULI * count
    return made_ahead(round(vectors * (PRODUCT_SENT_BYTES + PRODUCT_ANSWER_BYTES)), round(2 * vectors))


@dataclass(kw_only=True, slots=True)
class Use:
    """The preprocessing that calls consume, and the clocks of the parties after the calls.

    clocks: Clock of each party, in rounds.
    ots: Number of random OTs by direction; entry 0 counts those that party 0 sends.
    triples: Number of product triples.
    product_keys, matrix_keys: Whether the keys for element-wise products, or those for matrix products, are needed.
    """

    clocks: list[int] = field(default_factory=lambda: [0, 0])
    ots: list[int] = field(default_factory=lambda: [0, 0])
    triples: int = 0
    product_keys: bool = False
    matrix_keys: bool = False

    def deliver(self, sender: int) -> None:
        """Count a message of party `sender` (0 or 1) that the other party waits for."""
        self.clocks[1 - sender] = max(self.clocks[1 - sender], self.clocks[sender] + 1)

    def exchange(self) -> None:
        """Count a message from each party, both sent before either waits."""
        first, second = self.clocks
        self.clocks = [max(first, second + 1), max(second, first + 1)]

    def advance(self, sender: int, sender_clock: int, other_clock: int) -> None:
        """Move the sender's clock to `sender_clock` and the other party's to `other_clock`; no clock moves back."""
        moved = [other_clock, sender_clock] if sender == 1 else [sender_clock, other_clock]
        self.clocks = [max(old, new) for old, new in zip(self.clocks, moved, strict=True)]

    @property
    def share(self) -> Comm:
        """The cost of the consumed share of OT and triple batches, in whole bytes and messages, without keys."""
        return total_comm([ot_batches(sum(self.ots) / (BATCH - KEPT)), triple_batches(self.triples / TRIPLES)])


@dataclass(kw_only=True, slots=True)
class Stock:
    """The preprocessing that the parties have made and not yet used.

    spare_ots: Number of unused OTs, by direction as in `Use`; those of the first batches (`OT_START`) are included even
        before they are made. triples: Number of unused product triples.
    num_batches: Number of batches of OTs made so far, in both directions, without the first batches.
    """

    has_product_keys: bool = False
    has_matrix_keys: bool = False
    ots_started: bool = False
    spare_ots: list[int] = field(default_factory=lambda: [FIRST_BATCH - KEPT] * 2)
    triples: int = 0
    num_batches: int = 0

    def take(self, used: Use) -> Comm:
        """Take from the stock what a call uses, and return the cost of making what is missing.

        That can be keys, first OTs, and batches of OTs and triples. Spare OTs are used first. If spare triples do not
        suffice, triples are made for the whole call.

        Source: ot/yacl/yacl_ote_adapter.cc, rcot; state.cc, makeSureCacheSize.
        """
        made = []
        if used.product_keys and not self.has_product_keys:
            made.append(PRODUCT_KEYS)
        if used.matrix_keys and not self.has_matrix_keys:
            made.append(MATRIX_KEYS)
        if any(used.ots) and not self.ots_started:
            made.append(OT_START)
        self.has_product_keys |= used.product_keys
        self.has_matrix_keys |= used.matrix_keys
        self.ots_started |= any(used.ots)
        for direction, num_ots in enumerate(used.ots):
            batches = max(0, ceil((num_ots - self.spare_ots[direction]) / (BATCH - KEPT)))
            self.spare_ots[direction] += batches * (BATCH - KEPT) - num_ots
            self.num_batches += batches
            made.append(ot_batches(batches))
        batches = 0 if self.triples >= used.triples else ceil(used.triples / TRIPLES)
        self.triples += batches * TRIPLES - used.triples
        return total_comm([*made, triple_batches(batches)])
