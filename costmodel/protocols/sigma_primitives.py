"""The cost of each step of protocol `sigma`: what two parties open to each other, and the keys that a dealer makes.

Numbers are opened under masks: the parties compute on masked values that both see, and a key makes shares of a newly
masked result. A step therefore sends its output, whatever the size of its input, and most of its cost is its key.

Source of every formula: the code of Gupta et al. 2024, SIGMA, https://eprint.iacr.org/2023/1269: mpc-msri/EzPC, folder
GPU-MPC, commit f24bf3e. Files are in its folder `fss` unless another is named. Bytes and keys equal those of its public
logs exactly (`costmodel/testbeds/sigma_rows.csv`).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from costmodel.errors import UserError
from costmodel.protocols.primitives import NOTHING, Comm, Holder, WeightMasks, total_comm

NUM_PARTIES = 2
WORD_BITS = 64  # of a stored number or one in a key, however narrow the ring is
HEADER = 4  # bytes of each number in a key's header
BLOCK = 16  # bytes of an AES seed
TREE_BITS = 7  # levels of a tree whose leaves are the bits of one block; a function of at most 7 bits is a table
BATCH_BYTES = 24 * 2**30  # gpu_dpf.cu: greatest size of a batch of keys of one function
ROOT_INPUT_BITS = 13  # fixtobfloat16.cpp: 6 bits of exponent and 7 of mantissa
SYNC_BYTES = 1  # comms.cpp, SocketBuf::sync


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmaSetting:
    """The setting of protocol `sigma`: numbers modulo 2^ring_bits, in a model whose weights are secret-shared.

    ring_bits: In the code, 50 for GPT-2 and BERT, 51 for GPT-Neo, 48 for Llama 2, 37 for BERT-tiny (sigma.cu).
    fraction_bits: Bits after the point; 12 for every model of the code. A softmax has no formula for another number.

    Raises:
        UserError: Unless `fraction_bits` is from 7 to 16 and `ring_bits` from 2 x `fraction_bits` + 3 to 64, or if one
            party holds the weights.
    """

    formulas_of: ClassVar[str] = "SIGMA, mpc-msri/EzPC f24bf3e"
    weight_masks: ClassVar[WeightMasks] = "fresh"  # a key is good for one run

    ring_bits: int = 50
    fraction_bits: int = 12
    weights: Holder = "secret"

    def __post_init__(self) -> None:
        if self.weights != "secret":
            raise UserError(f"`weights` must be secret under protocol sigma, but got {self.weights}; leave it out.")
        if not 7 <= self.fraction_bits <= 16:
            raise UserError(f"`fraction_bits` must be from 7 to 16 under protocol sigma, but got {self.fraction_bits}.")
        # a product has twice the fraction bits, a truncation leaves a bit free, and GELU's input has at least 10 bits
        if not (least := 2 * self.fraction_bits + 3) <= self.ring_bits <= WORD_BITS:
            raise UserError(
                f"`ring_bits` must be from {least} to {WORD_BITS} under protocol sigma with {self.fraction_bits} "
                f"fraction bits, since products carry twice as many, but got {self.ring_bits}."
            )


def opened(elements: int, bits: int, word_bits: int = WORD_BITS) -> Comm:
    """Return the cost of opening `elements` numbers of `bits` bits; both parties send their shares at once.

    Shares are packed if `bits` is below `word_bits`, the width in which a number is stored. Source: gpu_comms.h and
    sigma_comms.cpp of `utils`, compressMem and getMemSz.
    """
    if bits <= 2:
        sent = packed_bytes(elements * bits)
    elif bits < word_bits:
        sent = 8 * -(-elements * bits // 64)
    else:
        sent = elements * word_bits // 8
    return _exchanged(sent)


def packed_bytes(bits: int) -> int:
    """Return the bytes of `bits` single bits, packed into words of 32 bits."""
    return 4 * -(-bits // 32)


def key(num_bytes: int) -> Comm:
    """Return the cost of a key of `num_bytes` per party, without communication."""
    return replace(NOTHING, key_bytes=num_bytes)


def comparison_key(elements: int, bits: int) -> int:
    """Return each party's bytes of the keys that compare `elements` numbers of `bits` bits with secret numbers.

    Source: gpu_dpf.cu, gpuKeyGenDCF, gpuKeyGenBatchedDPF and doDpfTreeKeyGen; gpu_sstab.h, genSSTable.
    """
    if bits <= TREE_BITS:
        return 2 * HEADER + (elements << max(0, bits - 3))
    levels = bits - TREE_BITS
    batch = BATCH_BYTES // ((levels + 2) * BLOCK) // 32 * 32
    sizes = [min(batch, elements - start) for start in range(0, elements, batch)]
    sent = (3 * HEADER + size * BLOCK * (levels + 2) + packed_bytes(size) * levels for size in sizes)
    return 3 * HEADER + sum(sent)


def looked_up(elements: int, bits: int, ring_bits: int, *, is_opened: bool = True) -> Comm:
    """Return the cost of looking up `elements` entries of a public table of 2^bits numbers.

    A point function is evaluated at every entry; its sign is opened, then its value. The entries found are opened if
    `is_opened`, and otherwise stay shared. Source: gpu_lut.cu, gpuDpfLUT.
    """
    point = 2 * 3 * HEADER + elements * (BLOCK * (bits - TREE_BITS + 2) + 4)
    keys = HEADER + point + packed_bytes(elements) + _selection_key(elements)
    last = [opened(elements, ring_bits)] if is_opened else []
    return total_comm([opened(elements, 1), opened(elements, ring_bits), *last, key(keys)])


def truncated(elements: int, bits: int, shift: int) -> Comm:
    """Return the cost of removing the `shift` lowest bits of `elements` numbers of `bits` bits, rounding down.

    Numbers are truncated to a ring of `bits` - `shift` bits, and then extended to the ring of `bits`; each step opens a
    carry or a sign, and then the number. Source: gpu_truncate.cu, TrFloor.
    """
    keys = 4 * HEADER + comparison_key(elements, shift) + comparison_key(elements, bits - shift)
    return total_comm(
        [
            *(opened(elements, 1), opened(elements, bits - shift), opened(elements, 1), opened(elements, bits)),
            key(keys + 2 * packed_bytes(elements) + 2 * 2 * 8 * elements),
        ]
    )


def truncated_small(elements: int, shift: int, to_bits: int, word_bits: int = WORD_BITS) -> Comm:
    """Return the cost of removing the `shift` lowest bits of `elements` numbers whose highest bit is not used.

    The results have `to_bits` bits and are stored in words of `word_bits` bits. Source: gpu_truncate.cu, TrWithSlack.
    """
    keys = 4 * HEADER + comparison_key(elements, shift) + packed_bytes(elements) + 3 * word_bits // 8 * elements
    return total_comm([opened(elements, 1), opened(elements, to_bits, word_bits), key(keys)])


def positive_part(elements: int, bits: int, to_bits: int, word_bits: int = WORD_BITS) -> Comm:
    """Return the cost of max(x, 0) for `elements` numbers x of `bits` bits: the sign is opened, then the result.

    The result has `to_bits` bits and is stored in a word of `word_bits` bits. Source: gpu_relu.cu, gpuRelu.
    """
    keys = 3 * HEADER + comparison_key(elements, bits - 1) + packed_bytes(elements)
    return total_comm(
        [opened(elements, 1), opened(elements, to_bits, word_bits), key(keys + _selection_key(elements, word_bits))]
    )


def gated(elements: int, ring_bits: int, fraction_bits: int, table_bits: int) -> Comm:
    """Return the cost of GELU or SiLU as max(x, 0) minus an entry of a table, which is looked up by |x|.

    The table has 2^table_bits entries (2^8 for GELU, 2^10 for SiLU); |x| has 6 fraction bits and is clipped. Source:
    gpu_gelu.cu, gpuKeyGenGelu and gpuGelu; sigma.h of `backend`.
    """
    bits, word_bits = ring_bits - 2 * fraction_bits + 7, 8 if table_bits <= 8 else 16
    signs = replace(_exchanged(2 * packed_bytes(elements)), key_bytes=HEADER + comparison_key(elements, bits - 1))
    clipped = replace(opened(elements, table_bits, word_bits), key_bytes=8 * word_bits // 8 * elements)
    return total_comm(
        [
            truncated_small(elements, fraction_bits - 6, bits),
            *(signs, key(2 * packed_bytes(elements)), clipped),
            looked_up(elements, table_bits, ring_bits, is_opened=False),
            *(opened(elements, ring_bits), key(_selection_key(elements))),
        ]
    )


def multiplied(elements: int, factors: int, ring_bits: int) -> Comm:
    """Return the cost of element-wise products by Beaver's method, where only the products are opened.

    elements: number of products and of left factors. factors: number of right factors, which may be fewer.

    Source: gpu_mul.cu; gpu_window.cu, windowMul.
    """
    return replace(opened(elements, ring_bits), key_bytes=8 * (2 * elements + factors))


def squared(elements: int, ring_bits: int, sums: int | None = None) -> Comm:
    """Return the cost of `elements` squares; `sums` sums of them are opened or, if that is None, the squares.

    Source: gpu_layernorm.cu, gpuLayerNorm.
    """
    return replace(opened(elements if sums is None else sums, ring_bits), key_bytes=2 * 8 * elements)


def matrix_product(operands: int, outputs: int, ring_bits: int) -> Comm:
    """Return the cost of a matrix product by Beaver's method, where only the result is opened.

    operands: elements of both factors together. outputs: elements of the result. The key has 8 bytes per element.

    Source: gpu_matmul.cu.
    """
    return replace(opened(outputs, ring_bits), key_bytes=8 * (operands + outputs))


def inverse_root(rows: int, ring_bits: int) -> Comm:
    """Return the cost of `rows` inverse roots, which the CPU looks up by a number's exponent and mantissa.

    There are 5 openings, and 3 synchronisations of a byte each.
    Source: api.cpp, fixtobfloat16.cpp and src/llama/comms.cpp of ext/sytorch/ext/llama: Rsqrt, F2BF16, LUT_dfpet,
        reconstructRT and Select.
    """
    number, narrow, levels = _stored(ring_bits), _stored(ROOT_INPUT_BITS), ROOT_INPUT_BITS - TREE_BITS
    sent = rows * (5 * number + narrow) + -(-rows // 8) + 3 * SYNC_BYTES
    highest_bit = BLOCK * (ring_bits + 1) + number * (ring_bits + 1) + 8
    cut = (BLOCK + 1) * (ring_bits - 7) + 8
    table = BLOCK * (levels + 2) + 2 * narrow + 8 + number + 1
    shares, selection = 5 * number + narrow, 5 * number
    key_bytes = rows * (highest_bit + cut + shares + table + selection)
    return replace(_exchanged(sent, rounds=5 + 3), key_bytes=key_bytes)


def _selection_key(elements: int, word_bits: int = WORD_BITS) -> int:
    """Return the bytes of the key that selects one of two numbers by a bit. Source: gpu_select.cu, gpuKeyGenSelect."""
    return 5 * word_bits // 8 * elements


def _exchanged(sent: int, rounds: int = 1) -> Comm:
    return Comm(rounds=rounds, messages=NUM_PARTIES * rounds, online_bytes=NUM_PARTIES * sent, waited_bytes=sent)


def _stored(bits: int) -> int:
    """Return the bytes of a number that the CPU sends and reads. Source: src/llama/comms.cpp, send_ge."""
    return next(num_bytes for num_bytes in (1, 2, 4, 8) if bits <= 8 * num_bytes)
