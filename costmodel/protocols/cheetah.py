"""The protocol `cheetah`: two parties, additive shares, lattice encryption and oblivious transfer; semi-honest.

Products are computed under RLWE encryption; comparisons and truncations use oblivious transfers (OTs), which are
extended in large batches. Keys, batches of OTs and cached product triples are preprocessing, made when first needed, so
the cost of an op depends on the ops before it. `walk` prices ops in the order in which the engine runs them; `comm`
prices one op by its share of the batches, so that costs add up.

Rounds are counted by two clocks, one per party, since a party that need not wait runs ahead of the other: a message
moves the receiver's clock to at least one after the sender's. An op takes as many rounds as the later clock advances.
Rounds do not include waiting for preprocessing.

Source of every formula: SecretFlow-SPU 0.9.5, libspu/mpc/cheetah (https://github.com/secretflow/spu), with one thread;
Huang et al. 2022, Cheetah, https://eprint.iacr.org/2022/207. Sizes of compressed ciphertexts and keys, and the cost of
the first OTs, are measured: spu 0.9.5, ring of 64 bits, sums over both parties. These sizes vary by 0.1 %.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import TypeAlias

from costmodel.errors import UserError
from costmodel.ops import Op, TokenEmbedding
from costmodel.protocols.cheetah_preprocessing import (
    DEGREE,
    MATRIX_KEYS,
    NUM_MODULI,
    NUM_PARTIES,
    OT_START,
    PRODUCT_ANSWER_BYTES,
    PRODUCT_KEYS,
    PRODUCT_SENT_BYTES,
    Stock,
    Use,
    ot_batches,
    triple_batches,
)
from costmodel.protocols.op_programs import calls_of
from costmodel.protocols.primitives import Call, Calls, Comm, EngineSetting, local, total_comm

RING_BITS = 64  # the encryption parameters are for this ring
WORD_BYTES = 8
Block: TypeAlias = tuple[int, int, int]  # rows, inner and columns of a block of a matrix

MATRIX_SENT_BYTES = 185_043  # an encrypted block; measured on 64 x 256 x 256, 128 x 64 x 128, 128 x 768 x 768
MATRIX_ANSWER_BYTES = 254_289  # its answer, two ring elements; measured on the same products
CACHED_ELEMENTS = 2 * DEGREE  # products of at least this many elements use no cached triples; arithmetic.cc, MulAA
SQUARE_HALVED = DEGREE  # squares of at most this many elements are not cut in two; arithmetic.cc, SquareA
DIGIT_BITS = 4  # nonlinear/compare_prot.h: numbers are compared digit by digit, each by one OT of 16 messages
OT_GROUP = 8  # messages are packed in groups of 8; ot/yacl/ferret.cc, kOTBatchSize
BLOCK_BITS = 128  # choices travel in blocks; yacl_ote_adapter.cc, recv_cot
BUFFER_BYTES = 1024 * 1024  # ot/yacl/ferret.cc, SEND_BUFFER_SIZE
ACKNOWLEDGED = 16  # ciphertexts are sent in groups of 16; the sender waits for one receipt a group; kCtAsyncParallel

# Made once a run, however little is used: keys, the first OTs, a batch of OTs per direction, and the unused rest of a
# batch of triples, half a batch in expectation.
ONCE = (PRODUCT_KEYS, MATRIX_KEYS, OT_START, *[ot_batches(1)] * 2, triple_batches(1 / 2))


def walk(ops: Iterable[Op], setting: EngineSetting) -> tuple[Comm, ...]:
    """Return the cost of each op, in order, in a run that starts with no preprocessing; errors are those of `comm`."""
    return tuple(cost for cost, _ in _walked(ops, setting))


def comm(op: Op, setting: EngineSetting) -> Comm:
    """Return the cost of one op, independent of the ops before it, so that costs add up in any order.

    Rounds are those of a run of only this op; after other ops it may take one round less. Online bytes equal those of
    `walk`. An op's preprocessing is its share of the batches of OTs and triples, rounded to whole bytes. The cost of a
    `TokenEmbedding`, of which a decoder usually has one, includes `ONCE`, what is made once a run. A UserError is
    raised for a ring that does not have 64 bits, and as by `calls_of`.
    """
    used = Use()
    online = total_comm(PRICES[call.primitive](call, used) for call in _calls(op, setting))
    once = ONCE if isinstance(op, TokenEmbedding) else ()
    return total_comm([replace(online, rounds=max(used.clocks)), used.share, *once])


def num_ots(op: Op, setting: EngineSetting) -> int:
    """Return the number of OTs that one op uses, in both directions together; errors are those of `comm`."""
    used = Use()
    for call in _calls(op, setting):
        PRICES[call.primitive](call, used)
    return sum(used.ots)


def batches_made(ops: Iterable[Op], setting: EngineSetting) -> tuple[int, ...]:
    """Return the number of OT batches made during each op, in order, in a run that starts with no preprocessing."""
    return tuple(num_batches for _, num_batches in _walked(ops, setting))


def _walked(ops: Iterable[Op], setting: EngineSetting) -> Iterator[tuple[Comm, int]]:
    stock, clocks = Stock(), [0, 0]
    for op in ops:
        parts, start, batches = list[Comm](), max(clocks), stock.num_batches
        for call in _calls(op, setting):
            used = Use(clocks=clocks)
            parts += [PRICES[call.primitive](call, used), stock.take(used)]
            clocks = used.clocks
        yield replace(total_comm(parts), rounds=max(clocks) - start), stock.num_batches - batches


def _calls(op: Op, setting: EngineSetting) -> Calls:
    if setting.ring_bits != RING_BITS:
        raise UserError(f"protocol cheetah is priced in a ring of {RING_BITS} bits, but got {setting.ring_bits}.")
    return calls_of(op, setting, share_bytes=WORD_BYTES)


def _multiply(call: Call, used: Use) -> Comm:
    """Encrypt one factor if the other is private, or halves of both if they are large; else use triples.

    Source: arithmetic.cc, MulAA, MulAV; state.cc.
    """
    used.product_keys = True
    if call.private:
        return _encrypted([call.elements], 1, used)
    if call.elements >= CACHED_ELEMENTS:
        half = call.elements // 2
        return _encrypted([half, call.elements - half], 2, used)
    used.triples += call.elements
    used.exchange()
    return _both_ways(NUM_PARTIES, NUM_PARTIES * 2 * WORD_BYTES * call.elements)


def _square(call: Call, used: Use) -> Comm:
    """Compute twice the product of the two shares; only one factor is encrypted. Source: arithmetic.cc, SquareA."""
    used.product_keys, half = True, call.elements // 2
    parts = [half, call.elements - half] if call.elements > SQUARE_HALVED else [call.elements]
    return _encrypted(parts, 1, used)


def _encrypted(parts: list[int], factors: int, used: Use) -> Comm:
    """Vectors are encrypted, sent, multiplied and answered; the first of a group waits for its receipt, two rounds."""
    clocks, num_vectors = used.clocks, 0
    for sender, part in zip((1, 0), parts, strict=False):
        vectors = NUM_MODULI * ceil(part / DEGREE)
        waits = 2 * ceil(vectors / ACKNOWLEDGED)
        received = max(clocks[1 - sender], clocks[sender] + factors * waits + 1)
        used.advance(sender, received + waits + 1, received + waits)
        num_vectors += vectors
    sent = _both_ways if len(parts) > 1 else _in_turn
    return sent(num_vectors * (factors + 1), num_vectors * (factors * PRODUCT_SENT_BYTES + PRODUCT_ANSWER_BYTES))


def _matmul(call: Call, used: Use) -> Comm:
    """Encrypt, per cross term, the factor with fewer blocks. Source: cheetah_dot.cc; arithmetic.cc, MatMulAA."""
    used.matrix_keys = True
    sent, answers, answer_bytes = _ciphertexts(call)
    clocks, waits = used.clocks, 2 * (ceil(sent / ACKNOWLEDGED) - 1)
    for sender in (0,) if call.private else (0, 1):
        received = max(clocks[1 - sender], clocks[sender] + waits + 1)
        used.advance(sender, received + 1, received)
    num_messages, num_bytes = sent + answers, sent * MATRIX_SENT_BYTES + answer_bytes
    if call.private:
        return _in_turn(num_messages, num_bytes)
    return _both_ways(NUM_PARTIES * num_messages, NUM_PARTIES * num_bytes)


def _ciphertexts(call: Call) -> tuple[int, int, int]:
    """Return the blocks sent, answers (packed if there are several) and bytes of answers of one cross term."""
    rows, columns = call.factors
    inner = call.operands // (rows + columns)
    block, packed = _blocks(rows, inner, columns)
    results = ceil(rows / block[0]) * ceil(columns / block[2])
    if not packed:
        answers = results
        # one ring element, and of the other only the coefficients of the result
        answer_bytes = answers * MATRIX_ANSWER_BYTES // 2 + call.elements * MATRIX_ANSWER_BYTES // (2 * DEGREE)
    else:
        by_blocks = block[1] < call.elements
        answers = ceil(results / block[1]) if by_blocks else ceil(call.elements / DEGREE)
        answer_bytes = answers * MATRIX_ANSWER_BYTES
    sent = ceil(inner / block[1]) * min(ceil(rows / block[0]), ceil(columns / block[2]))
    return sent, answers, answer_bytes


def _blocks(rows: int, inner: int, columns: int) -> tuple[Block, bool]:
    """Return the block shape of a matrix product, and whether there are several blocks, whose answers are packed."""
    block = best_block(rows, inner, columns, packed=True)
    if ceil(rows / block[0]) * ceil(columns / block[2]) > 1:
        return block, True
    return best_block(rows, inner, columns, packed=False), False


def matrix_work(calls: Calls) -> dict[str, int]:
    """Return the work of the matrix products among calls, by unit, for one cross term of each.

    A cross term is one party's share of a factor times the other party's share of the other factor. The units are
    `products` of blocks; `results`, the blocks that products add up to; and `switches`, the key switches that pack
    results. Nearly as many blocks are encoded as are multiplied. Products with public weights are left out.
    """
    products = results = switches = 0
    for call in calls:
        if call.primitive == "matmul":
            rows, columns = call.factors
            inner = call.operands // (rows + columns)
            block, packed = _blocks(rows, inner, columns)
            of_call = ceil(rows / block[0]) * ceil(columns / block[2])
            results += of_call
            products += of_call * ceil(inner / block[1])
            switches += key_switches(rows, columns, block) if packed else 0
    return {"products": products, "results": results, "switches": switches}


def _msb(call: Call, used: Use) -> Comm:
    """Compare digits by an OT, and combine them by a tree. Source: arithmetic.cc, MsbA2B; nonlinear/compare_prot.cc."""
    digits = RING_BITS // DIGIT_BITS
    num_digits = call.elements * digits
    parts = [_chosen(num_digits * DIGIT_BITS, num_digits * 2 * 2**DIGIT_BITS // 8, 0, used)]
    while digits > 1:
        digits //= 2
        parts.append(_and_opened(call.elements, 1, 2, used))
        if digits > 1:
            parts.append(_and_opened(call.elements * (digits - 1), 1, 3, used))
    return total_comm(parts)


def _a2b(call: Call, used: Use) -> Comm:
    """A Kogge-Stone adder. Source: conversion.cc, A2B; ab_api.cc, ppa_kogge_stone."""
    levels = (RING_BITS - 1).bit_length()
    doublings = [_and_opened(2 * call.elements, RING_BITS, 2, used) for _ in range(levels)]
    return total_comm([_and_opened(call.elements, RING_BITS, 2, used), *doublings])


def _b2a(call: Call, used: Use) -> Comm:
    """Use an OT per bit, as wide as the bits left above it. Source: ot/basic_ot_prot.cc, SingleB2A and PackedB2A."""
    if call.bits == 1:
        return _correlated_ot(call.elements, RING_BITS, 0, used)
    num_ots = call.elements * call.bits
    message_bytes = call.elements * sum(ceil((RING_BITS - bit) / 8) for bit in range(call.bits))
    return _chosen(num_ots, message_bytes, 0, used)


def _equal(call: Call, used: Use) -> Comm:
    """Compare digits by an OT, combine by halving, convert. Source: arithmetic.cc, EqualAP; equal_prot.cc."""
    digits = RING_BITS // DIGIT_BITS
    num_digits = call.elements * digits
    parts = [_chosen(num_digits * DIGIT_BITS, num_digits * 2**DIGIT_BITS // 8, 0, used)]
    while digits > 1:
        digits //= 2
        parts.append(_and_opened(call.elements * digits, 1, 2, used))
    return total_comm([*parts, _b2a(replace(call, bits=1), used)])


def _and_opened(elements: int, bits: int, num_opened: int, used: Use) -> Comm:
    """An AND opens 2 masked values, two ANDs with a common factor open 3. Source: ot/basic_ot_prot.cc, BitwiseAnd."""
    used.ots = [num_ots + elements * bits for num_ots in used.ots]
    for _ in range(num_opened):
        used.exchange()
    words = ceil(elements * bits / RING_BITS)
    return _both_ways(NUM_PARTIES * num_opened, NUM_PARTIES * num_opened * words * WORD_BYTES)


def _correlated_ot(elements: int, bits: int, direction: int, used: Use) -> Comm:
    """Use an OT per element whose messages differ by a chosen number of `bits` bits; only the difference is sent."""
    groups, rest = divmod(elements, OT_GROUP)
    words = groups * ceil(OT_GROUP * bits / RING_BITS) + ceil(rest * bits / RING_BITS)
    return _chosen(elements, words * WORD_BYTES, direction, used)


def _chosen(num_ots: int, message_bytes: int, sender: int, used: Use) -> Comm:
    """The receiver sends its choices, a bit each, then the sender its messages. Source: ot/yacl/ferret.cc."""
    used.ots[sender] += num_ots
    used.deliver(1 - sender)
    used.deliver(sender)
    choices = ceil(num_ots / BLOCK_BITS) * BLOCK_BITS // 8
    return _in_turn(1 + ceil(message_bytes / BUFFER_BYTES), choices + message_bytes)


def _in_turn(num_messages: int, num_bytes: int) -> Comm:
    """Bytes sent one after the other; the clocks count the rounds."""
    return Comm(rounds=0, messages=num_messages, online_bytes=num_bytes, waited_bytes=num_bytes)


def _both_ways(num_messages: int, num_bytes: int) -> Comm:
    """Bytes sent half by each party, at once; the clocks count the rounds."""
    return Comm(rounds=0, messages=num_messages, online_bytes=num_bytes, waited_bytes=num_bytes // NUM_PARTIES)


PRICES: dict[str, Callable[[Call, Use], Comm]] = {
    "multiply": _multiply,
    "square": _square,
    "matmul": _matmul,
    "public_matmul": local,  # arithmetic_semi2k.cc, MatMulAP
    # the carry of the cut bits, by one OT; nonlinear/truncate_prot.cc, Compute and MSB1ToWrap
    "truncate": lambda call, used: _correlated_ot(call.elements, call.bits, 0, used),
    "msb": _msb,
    # one OT per direction; ot/basic_ot_prot.cc, Multiplexer
    "mux": lambda call, used: total_comm(_correlated_ot(call.elements, RING_BITS, side, used) for side in (0, 1)),
    "a2b": _a2b,
    "b2a": _b2a,
    "equal": _equal,
    "and": lambda call, used: _and_opened(call.elements, call.bits, 2, used),
    "share": local,  # arithmetic_semi2k.cc, P2A and V2A
    "input": local,
}


@lru_cache(maxsize=4096)  # an architecture has many products, but few shapes
def best_block(rows: int, inner: int, columns: int, *, packed: bool) -> Block:
    """Return the shape (rows, inner, columns) of the blocks in which the product of two matrices is cheapest.

    The factors are rows x inner and inner x columns. If `packed`, answers are packed and blocks have an inner dimension
    that is a power of two. Of equally cheap shapes, the engine takes that with the most rows, then the largest inner
    dimension. Source: arith/matmat_prot.cc, GetSubMatShape, which tries every shape; here only likely shapes are tried.
    """
    candidates = _candidates(rows, inner, columns, packed=packed)
    return max(candidates, key=lambda block: (-_price(rows, inner, columns, block, packed=packed), block))


def _price(rows: int, inner: int, columns: int, block: Block, *, packed: bool) -> float:
    """Weigh a ciphertext by 1000, a key switch by 1 and a product of ciphertexts by 0.1."""
    high, deep, wide = block
    blocks = ceil(rows / high), ceil(inner / deep), ceil(columns / wide)
    sent, answers = min(blocks[0], blocks[2]) * blocks[1], ceil(blocks[0] * blocks[2] / deep)
    switches = key_switches(rows, columns, block) if packed else 0
    return 1000.0 * (sent + answers) + switches + blocks[0] * blocks[1] * blocks[2] / 10


def key_switches(rows: int, columns: int, block: Block) -> int:
    """Return the number of key switches that pack a rows x columns result, in blocks, into full ciphertexts."""
    return ceil(rows * columns / DEGREE) * block[1]


def _candidates(rows: int, inner: int, columns: int, *, packed: bool) -> Iterator[Block]:
    """Yield, for each depth and number of row blocks, the one shape that can win."""
    # of heights with as many row blocks, the lowest leaves room for the widest blocks and is the cheapest
    heights, deepest = list(_heights(min(DEGREE, rows), rows)), min(inner, DEGREE)
    for deep in (1 << power for power in range(deepest.bit_length())) if packed else range(1, deepest + 1):
        room = DEGREE // deep
        for lowest, highest in heights:
            if lowest > room:
                break
            num_columns = ceil(columns / min(columns, room // lowest))
            high = min(highest, room // ceil(columns / num_columns))
            yield high, deep, min(columns, room // high)


def _heights(highest: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the lowest and highest of the heights that need the same number of row blocks, from 1 to `highest`."""
    low = 1
    while low <= highest:
        num_blocks = ceil(rows / low)
        high = highest if num_blocks == 1 else min(highest, (rows - 1) // (num_blocks - 1))
        yield low, high
        low = high + 1
