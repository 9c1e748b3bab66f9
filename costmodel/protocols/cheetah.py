"""The protocol `cheetah`: two parties, additive shares, lattice encryption and oblivious transfer; semi-honest.

Products are computed under RLWE encryption, comparisons and truncations by oblivious transfers (OTs) that are extended
in large batches. Keys, batches of OTs and cached product triples are made when first needed, so that what an op costs
depends on what ran before it: a `Ledger` keeps account, and `walk` prices ops in the order in which the engine runs
them. All of that is counted as set-up; none of it depends on the data.

Rounds are counted by two clocks, one per party, since a party that waits for nothing runs ahead of the other: a
message moves its receiver's clock to one after its sender's. An op takes as many rounds as the later clock advances.
What set-up waits for is not in them.

Source of every formula: SecretFlow-SPU 0.9.5, libspu/mpc/cheetah (https://github.com/secretflow/spu), with one
thread; Huang et al. 2022, Cheetah, https://eprint.iacr.org/2022/207. Sizes of compressed ciphertexts and keys, and
what starting OTs costs, are measured: spu 0.9.5, ring of 64 bits, sums over both parties. They vary by 0.1 %.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import ceil, inf

from costmodel.ops import Op
from costmodel.protocols.calls import Call, Calls, Comm, Setting, total
from costmodel.protocols.programs import calls_of

NUM_PARTIES = 2
RING_BITS = 64  # parameters of the encryption below are those for this ring
WORD_BYTES = 8

DEGREE = 8192  # coefficients of a ring element of the encryption; arith/cheetah_mul.cc, arith/cheetah_dot.cc
NUM_MODULI = 4  # plaintext primes of 45 bits for 64 + 64 + 32 bits; arith/cheetah_mul.cc, TotalCRTBitLen
PRODUCT_SENT_BYTES = 161_025  # an encrypted vector, one prime; measured on products of 16,384 elements
PRODUCT_ANSWER_BYTES = 124_947  # its answer; measured likewise
PRODUCT_KEYS_BYTES = 321_746  # both public keys; measured on a first product
MATRIX_SENT_BYTES = 185_043  # an encrypted block; measured on 64 x 256 x 256, 128 x 64 x 128, 128 x 768 x 768
MATRIX_ANSWER_BYTES = 254_289  # its answer, two ring elements; measured likewise
MATRIX_KEYS_BYTES = 19_428_501  # both public keys and keys for packing; measured on a first matrix product
CACHED_ELEMENTS = 2 * DEGREE  # from so many elements on, products do without cached triples; arithmetic.cc, MulAA
SQUARE_HALVED = DEGREE  # up to so many elements, squares are not cut in two; arithmetic.cc, SquareA

# OT extension by Ferret: n of a batch, of which k + t log2(n / t) are kept for the next; ot/yacl/yacl_ote_adapter.h
BATCH, KEPT = 10_485_760, 452_000 + 1280 * 13
FIRST_BATCH = 470_016
BATCH_BYTES = 1280 * 13 * 16 + 19  # t trees of log2(n / t) levels, a block each; the rest measured
START_BYTES = 940_326  # base OTs and first batches, both directions; measured on a first comparison
BATCH_MESSAGES, START_MESSAGES = 1281, 1858  # measured likewise
DIGIT_BITS = 4  # nonlinear/compare_prot.h: compared by digits, each one OT of 16 messages
OT_GROUP = 8  # messages are packed in groups of so many; ot/yacl/ferret.cc, kOTBatchSize
BLOCK_BITS = 128  # choices travel in blocks; yacl_ote_adapter.cc, recv_cot
BUFFER_BYTES = 1024 * 1024  # ot/yacl/ferret.cc, SEND_BUFFER_SIZE
ACKNOWLEDGED = 16  # ciphertexts are sent in groups of so many, one of which waits for its receipt; kCtAsyncParallel


@dataclass(kw_only=True)
class Ledger:
    """What the parties have made and not yet used.

    spare_ots: by direction, 0 where party 0 sends. triples: products of random numbers, cached for small products.
    clocks: of both parties, in rounds.
    """

    product_keys: bool = False
    matrix_keys: bool = False
    ots_started: bool = False
    spare_ots: list[int] = field(default_factory=lambda: [FIRST_BATCH - KEPT] * 2)
    triples: int = 0
    clocks: list[int] = field(default_factory=lambda: [0, 0])

    def deliver(self, sender: int) -> None:
        """A message from one party, which the other waits for."""
        self.clocks[1 - sender] = max(self.clocks[1 - sender], self.clocks[sender] + 1)

    def exchange(self) -> None:
        """A message from each party, both sent before either waits."""
        first, second = self.clocks
        self.clocks = [max(first, second + 1), max(second, first + 1)]


def walk(ops: Iterable[Op], setting: Setting) -> tuple[Comm, ...]:
    """The cost of each op in a fresh run of all of them, in order.

    Raises ValueError for a ring that is not of 64 bits, or an op without a program.
    """
    if setting.ring_bits != RING_BITS:
        raise ValueError(f"protocol cheetah is priced in a ring of {RING_BITS} bits, but got {setting.ring_bits}.")
    ledger = Ledger()
    return tuple(_price(calls_of(op, setting, share_bytes=WORD_BYTES), ledger) for op in ops)


def _price(calls: Calls, ledger: Ledger) -> Comm:
    start = max(ledger.clocks)
    comm = total(PRICES[call.primitive](call, ledger) for call in calls)
    return replace(comm, rounds=max(ledger.clocks) - start)


def _multiply(call: Call, ledger: Ledger) -> Comm:
    """Large: each half is encrypted by one party, both factors, and answered. Small: Beaver, with cached triples.

    Source: arithmetic.cc, MulAA; arith/cheetah_mul.cc, MulShare; state.cc, makeSureCacheSize.
    """
    keys = _product_keys(ledger)
    if call.elements >= CACHED_ELEMENTS:
        half = call.elements // 2
        return total([keys, _encrypted([half, call.elements - half], 2, ledger)])
    made = _triples(call.elements, ledger)
    ledger.exchange()
    return total([keys, made, _sent(NUM_PARTIES, NUM_PARTIES * 2 * WORD_BYTES * call.elements)])


def _square(call: Call, ledger: Ledger) -> Comm:
    """Twice the product of the two shares: one factor is encrypted. Source: arithmetic.cc, SquareA."""
    half = call.elements // 2 if call.elements > SQUARE_HALVED else call.elements
    parts = [half, call.elements - half] if half < call.elements else [half]
    return total([_product_keys(ledger), _encrypted(parts, 1, ledger)])


def _encrypted(parts: list[int], factors: int, ledger: Ledger) -> Comm:
    """Vectors are encrypted, sent, multiplied with the other party's and answered; the parts go opposite ways at once.

    The first ciphertext of a group waits for its receipt, two rounds, before the others are sent.
    """
    clocks, num_vectors = ledger.clocks, 0
    for sender, part in zip((1, 0), parts, strict=False):
        vectors = NUM_MODULI * ceil(part / DEGREE)
        waits = 2 * ceil(vectors / ACKNOWLEDGED)
        received = max(clocks[1 - sender], clocks[sender] + factors * waits + 1)
        ledger.clocks = _later(ledger.clocks, sender, received + waits + 1, received + waits)
        num_vectors += vectors
    return _sent(num_vectors * (factors + 1), num_vectors * (factors * PRODUCT_SENT_BYTES + PRODUCT_ANSWER_BYTES))


def _later(clocks: list[int], sender: int, sender_clock: int, other_clock: int) -> list[int]:
    """Both clocks, moved on but never back."""
    new = [other_clock, sender_clock] if sender == 1 else [sender_clock, other_clock]
    return [max(old, moved) for old, moved in zip(clocks, new, strict=True)]


def _triples(elements: int, ledger: Ledger) -> Comm:
    """Cached triples are taken; if they do not suffice, enough for all elements are made: two products each."""
    batches = 0 if ledger.triples >= elements else ceil(2 * elements / DEGREE)
    ledger.triples += batches * DEGREE // 2 - elements
    vectors = NUM_MODULI * batches
    return _setup(vectors * (PRODUCT_SENT_BYTES + PRODUCT_ANSWER_BYTES), 2 * vectors)


def _product_keys(ledger: Ledger) -> Comm:
    if ledger.product_keys:
        return _setup(0, 0)
    ledger.product_keys = True
    return _setup(PRODUCT_KEYS_BYTES, NUM_PARTIES)


def _matmul(call: Call, ledger: Ledger) -> Comm:
    """Per cross term, the factor of fewer blocks is encrypted and sent; answers are packed where there are several.

    Source: arith/cheetah_dot.cc, doDotOLE; arithmetic.cc, MatMulAA.
    """
    keys = _setup(0, 0) if ledger.matrix_keys else _setup(MATRIX_KEYS_BYTES, 2 * NUM_PARTIES)
    ledger.matrix_keys = True
    rows, columns = call.factors
    inner = call.operands // (rows + columns)
    block = best_block(rows, inner, columns, packed=True)
    results = ceil(rows / block[0]) * ceil(columns / block[2])
    if results == 1:
        block = best_block(rows, inner, columns, packed=False)
        answers = ceil(rows / block[0]) * ceil(columns / block[2])
        # one ring element, and of the other only the coefficients of the result
        answer_bytes = answers * MATRIX_ANSWER_BYTES // 2 + call.elements * MATRIX_ANSWER_BYTES // (2 * DEGREE)
    else:
        by_blocks = block[1] < call.elements
        answers = ceil(results / block[1]) if by_blocks else ceil(call.elements / DEGREE)
        answer_bytes = answers * MATRIX_ANSWER_BYTES
    sent = ceil(inner / block[1]) * min(ceil(rows / block[0]), ceil(columns / block[2]))
    clocks, waits = ledger.clocks, 2 * (ceil(sent / ACKNOWLEDGED) - 1)
    for sender in (0, 1):  # both cross terms at once
        received = max(clocks[1 - sender], clocks[sender] + waits + 1)
        ledger.clocks = _later(ledger.clocks, sender, received + 1, received)
    answered = NUM_PARTIES * (sent * MATRIX_SENT_BYTES + answer_bytes)
    return total([keys, _sent(NUM_PARTIES * (sent + answers), answered)])


def best_block(rows: int, inner: int, columns: int, *, packed: bool) -> tuple[int, int, int]:
    """Shape of the blocks that one ring element holds, of least price; the last of several that are equal.

    A ciphertext is priced 1000, a key switch 1, a product of ciphertexts 0.1. Source: arith/matmat_prot.cc,
    GetSubMatShape.
    """
    best, least = (1, 1, 1), inf
    for high in range(1, min(DEGREE, rows) + 1):
        deep = 1
        while deep <= inner and high * deep <= DEGREE:
            wide = min(columns, DEGREE // high // deep)
            blocks = ceil(rows / high), ceil(inner / deep), ceil(columns / wide)
            sent, answers = min(blocks[0], blocks[2]) * blocks[1], ceil(blocks[0] * blocks[2] / deep)
            switches = ceil(rows * columns / DEGREE) * deep if packed else 0
            price = 1000.0 * (sent + answers) + switches + blocks[0] * blocks[1] * blocks[2] / 10
            if price <= least:
                best, least = (high, deep, wide), price
            deep = 2 * deep if packed else deep + 1
    return best


def _truncate(call: Call, ledger: Ledger) -> Comm:
    """The carry of the cut bits, by one OT: the engine moves every number to where its sign is known.

    Source: nonlinear/truncate_prot.cc, Compute and MSB1ToWrap.
    """
    return _correlated_ot(call.elements, call.bits, 0, ledger)


def _sign(call: Call, ledger: Ledger) -> Comm:
    """Digits are compared by an OT of 16 messages of 2 bits; a tree joins digits, but for the lowest also equality.

    Source: arithmetic.cc, MsbA2B; nonlinear/compare_prot.cc, DoCompute and TraversalANDFullBinaryTree.
    """
    digits = RING_BITS // DIGIT_BITS
    num_digits = call.elements * digits
    message_bytes = num_digits * 2 * 2**DIGIT_BITS // 8
    parts = [_chosen(num_digits * DIGIT_BITS, message_bytes, 0, ledger)]
    while digits > 1:
        digits //= 2
        parts.append(_conjoined(call.elements, 1, 2, ledger))
        if digits > 1:
            parts.append(_conjoined(call.elements * (digits - 1), 1, 3, ledger))
    return total(parts)


def _select(call: Call, ledger: Ledger) -> Comm:
    """One OT per direction. Source: ot/basic_ot_prot.cc, Multiplexer."""
    return total(_correlated_ot(call.elements, RING_BITS, direction, ledger) for direction in (0, 1))


def _to_bits(call: Call, ledger: Ledger) -> Comm:
    """A Kogge-Stone adder. Source: conversion.cc, A2B; ab_api.cc, ppa_kogge_stone."""
    levels = (RING_BITS - 1).bit_length()
    doublings = [_conjoined(2 * call.elements, RING_BITS, 2, ledger) for _ in range(levels)]
    return total([_conjoined(call.elements, RING_BITS, 2, ledger), *doublings])


def _to_arithmetic(call: Call, ledger: Ledger) -> Comm:
    """An OT per bit, of as many bits as are left above it. Source: ot/basic_ot_prot.cc, SingleB2A and PackedB2A."""
    if call.bits == 1:
        return _correlated_ot(call.elements, RING_BITS, 0, ledger)
    num_ots = call.elements * call.bits
    message_bytes = call.elements * sum(ceil((RING_BITS - bit) / 8) for bit in range(call.bits))
    return _chosen(num_ots, message_bytes, 0, ledger)


def _conjoin(call: Call, ledger: Ledger) -> Comm:
    return _conjoined(call.elements, call.bits, 2, ledger)


def _share(call: Call, ledger: Ledger) -> Comm:
    """Local. Source: arithmetic_semi2k.cc, P2A."""
    return _setup(0, 0)


def _conjoined(elements: int, bits: int, num_opened: int, ledger: Ledger) -> Comm:
    """A random OT per bit and direction makes a triple; masked values are opened, one after the other.

    num_opened: 2 for an AND, 3 for two ANDs with a common factor. Source: ot/basic_ot_prot.cc, BitwiseAnd and
    CorrelatedBitwiseAnd.
    """
    made = [_take(elements * bits, direction, ledger) for direction in (0, 1)]
    for _ in range(num_opened):
        ledger.exchange()
    words = ceil(elements * bits / RING_BITS)
    return total([*made, _sent(NUM_PARTIES * num_opened, NUM_PARTIES * num_opened * words * WORD_BYTES)])


def _correlated_ot(elements: int, bits: int, direction: int, ledger: Ledger) -> Comm:
    """An OT per element whose messages differ by a chosen number of so many bits; only the difference is sent."""
    groups, rest = divmod(elements, OT_GROUP)
    words = groups * ceil(OT_GROUP * bits / RING_BITS) + ceil(rest * bits / RING_BITS)
    return _chosen(elements, words * WORD_BYTES, direction, ledger)


def _chosen(num_ots: int, message_bytes: int, sender: int, ledger: Ledger) -> Comm:
    """The receiver's choices, a bit each, then the sender's messages. Source: ot/yacl/ferret.cc."""
    made = _take(num_ots, sender, ledger)
    ledger.deliver(1 - sender)
    ledger.deliver(sender)
    choices = ceil(num_ots / BLOCK_BITS) * BLOCK_BITS // 8
    return total([made, _sent(1 + ceil(message_bytes / BUFFER_BYTES), choices + message_bytes)])


def _take(num_ots: int, direction: int, ledger: Ledger) -> Comm:
    """Random OTs, from batches that are made as needed. Source: ot/yacl/yacl_ote_adapter.cc, rcot."""
    num_bytes = num_messages = 0
    if not ledger.ots_started:
        ledger.ots_started = True
        num_bytes, num_messages = START_BYTES, START_MESSAGES
    batches = max(0, ceil((num_ots - ledger.spare_ots[direction]) / (BATCH - KEPT)))
    ledger.spare_ots[direction] += batches * (BATCH - KEPT) - num_ots
    return _setup(num_bytes + batches * BATCH_BYTES, num_messages + batches * BATCH_MESSAGES)


def _sent(num_messages: int, num_bytes: int) -> Comm:
    """Of the online part; its rounds are read off the clocks."""
    return Comm(rounds=0, messages=num_messages, online_bytes=num_bytes)


def _setup(num_bytes: int, num_messages: int) -> Comm:
    return Comm(rounds=0, messages=num_messages, online_bytes=0, setup_bytes=num_bytes)


PRICES: dict[str, Callable[[Call, Ledger], Comm]] = {
    "multiply": _multiply,
    "square": _square,
    "matmul": _matmul,
    "truncate": _truncate,
    "sign": _sign,
    "select": _select,
    "to_bits": _to_bits,
    "to_arithmetic": _to_arithmetic,
    "conjoin": _conjoin,
    "share": _share,
}
