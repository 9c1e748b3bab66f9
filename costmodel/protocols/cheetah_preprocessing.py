"""What the parties of `cheetah` make ahead of a product or comparison: keys, oblivious transfers (OTs), triples.

Two accounts of the same things, each a `Preprocessing`. A `PreprocessingState` makes them when they run out, as the
engine does, so that the cost of an op depends on what ran before it. An `AmortisedPreprocessing` charges an op for the
part of the batches that it uses up, so that costs add up in any order. None of it depends on the data.

Source: SecretFlow-SPU 0.9.5, libspu/mpc/cheetah (https://github.com/secretflow/spu), with one thread. Sizes of keys and
compressed ciphertexts, and what starting OTs costs, are measured, in a ring of 64 bits, as sums over both parties.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import ceil

from costmodel.protocols.cheetah_packing import DEGREE
from costmodel.protocols.primitives import NOTHING, Comm, total_comm

NUM_PARTIES = 2
NUM_MODULI = 4  # plaintext primes of 45 bits for 64 + 64 + 32 bits; arith/cheetah_mul.cc, TotalCRTBitLen
PRODUCT_SENT_BYTES = 161_025  # an encrypted vector, one prime; measured on products of 16,384 elements
PRODUCT_ANSWER_BYTES = 124_947  # its answer; measured likewise
PRODUCT_KEYS_BYTES = 321_746  # both public keys; measured on a first product
MATRIX_KEYS_BYTES = 19_428_501  # both public keys and keys for packing; measured on a first matrix product

# OT extension by Ferret: n of a batch, of which k + t log2(n / t) are kept for the next; ot/yacl/yacl_ote_adapter.h
BATCH, KEPT = 10_485_760, 452_000 + 1280 * 13
FIRST_BATCH = 470_016
BATCH_BYTES = 1280 * 13 * 16 + 19  # t trees of log2(n / t) levels, a block each; the rest measured
START_BYTES = 940_326  # base OTs and first batches, both directions; measured on a first comparison
BATCH_MESSAGES, START_MESSAGES = 1281, 1858  # measured likewise
TRIPLES = DEGREE // 2  # made by one vector of each prime; state.cc, makeSureCacheSize


def made_ahead(num_bytes: int, num_messages: int) -> Comm:
    """Bytes and messages made ahead; what they wait for is not in the rounds.

    No two of them are under way at once: keys are received before they are answered, and triples and OTs are made by
    one party sending and the other answering. Source: arith/cheetah_mul.cc, LazyExpandSEALContexts; state.cc,
    makeSureCacheSize; on a link of 3 Mbit/s, products from triples took 0.97 of all their bytes.
    """
    return Comm(rounds=0, messages=num_messages, online_bytes=0, setup_bytes=num_bytes, waited_bytes=num_bytes)


PRODUCT_KEYS = made_ahead(PRODUCT_KEYS_BYTES, 2)
MATRIX_KEYS = made_ahead(MATRIX_KEYS_BYTES, 4)
OT_START = made_ahead(START_BYTES, START_MESSAGES)


def ot_batches(count: float) -> Comm:
    """Batches of OTs, in one direction; a share of a batch is rounded to whole bytes and messages."""
    return made_ahead(round(count * BATCH_BYTES), round(count * BATCH_MESSAGES))


def triple_batches(count: float) -> Comm:
    """Batches of products of random numbers, two products each; rounded likewise."""
    vectors = NUM_MODULI * count
    return made_ahead(round(vectors * (PRODUCT_SENT_BYTES + PRODUCT_ANSWER_BYTES)), round(2 * vectors))


@dataclass(kw_only=True)
class Preprocessing(ABC):
    """What has been made, and when. clocks: of both parties, in rounds."""

    clocks: list[int] = field(default_factory=lambda: [0, 0])

    @abstractmethod
    def product_keys(self) -> Comm:
        """Before any product."""

    @abstractmethod
    def matrix_keys(self) -> Comm:
        """Before any matrix product."""

    @abstractmethod
    def take_ots(self, num_ots: int, sender: int) -> Comm:
        """Random OTs of one direction, 0 where party 0 sends."""

    @abstractmethod
    def take_triples(self, elements: int) -> Comm:
        """Products of random numbers for a small product."""

    def deliver(self, sender: int) -> None:
        """A message from one party, which the other waits for."""
        self.clocks[1 - sender] = max(self.clocks[1 - sender], self.clocks[sender] + 1)

    def exchange(self) -> None:
        """A message from each party, both sent before either waits."""
        first, second = self.clocks
        self.clocks = [max(first, second + 1), max(second, first + 1)]

    def advance(self, sender: int, sender_clock: int, other_clock: int) -> None:
        """Both clocks, moved on but never back."""
        moved = [other_clock, sender_clock] if sender == 1 else [sender_clock, other_clock]
        self.clocks = [max(old, new) for old, new in zip(self.clocks, moved, strict=True)]


@dataclass(kw_only=True)
class PreprocessingState(Preprocessing):
    """What the parties have made and not yet used.

    spare_ots: by direction, 0 where party 0 sends. triples: products of random numbers, cached for small products.
    num_batches: batches of OTs made so far.
    """

    has_product_keys: bool = False
    has_matrix_keys: bool = False
    ots_started: bool = False
    spare_ots: list[int] = field(default_factory=lambda: [FIRST_BATCH - KEPT] * 2)
    triples: int = 0
    num_batches: int = 0

    def product_keys(self) -> Comm:
        made = NOTHING if self.has_product_keys else PRODUCT_KEYS
        self.has_product_keys = True
        return made

    def matrix_keys(self) -> Comm:
        made = NOTHING if self.has_matrix_keys else MATRIX_KEYS
        self.has_matrix_keys = True
        return made

    def take_ots(self, num_ots: int, sender: int) -> Comm:
        """From batches that are made as needed. Source: ot/yacl/yacl_ote_adapter.cc, rcot."""
        start = NOTHING if self.ots_started else OT_START
        self.ots_started = True
        batches = max(0, ceil((num_ots - self.spare_ots[sender]) / (BATCH - KEPT)))
        self.spare_ots[sender] += batches * (BATCH - KEPT) - num_ots
        self.num_batches += batches
        return total_comm([start, ot_batches(batches)])

    def take_triples(self, elements: int) -> Comm:
        """Cached ones, or if they do not suffice, enough for all elements are made. Source: makeSureCacheSize."""
        batches = 0 if self.triples >= elements else ceil(elements / TRIPLES)
        self.triples += batches * TRIPLES - elements
        return triple_batches(batches)


@dataclass(kw_only=True)
class AmortisedPreprocessing(Preprocessing):
    """What one op has used of what is made in batches; keys and the first OTs are not its own to pay."""

    num_ots: int = 0
    num_triples: int = 0

    def product_keys(self) -> Comm:
        return NOTHING

    def matrix_keys(self) -> Comm:
        return NOTHING

    def take_ots(self, num_ots: int, sender: int) -> Comm:
        self.num_ots += num_ots
        return NOTHING

    def take_triples(self, elements: int) -> Comm:
        self.num_triples += elements
        return NOTHING

    def comm(self) -> Comm:
        """The share of all batches taken from, to whole bytes and messages."""
        return total_comm([ot_batches(self.num_ots / (BATCH - KEPT)), triple_batches(self.num_triples / TRIPLES)])
