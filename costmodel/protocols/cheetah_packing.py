"""How a matrix product is cut into blocks that fit a ring element of the encryption.

Source: SecretFlow-SPU 0.9.5, libspu/mpc/cheetah/arith/matmat_prot.cc, GetSubMatShape
(https://github.com/secretflow/spu), which tries every shape; here only those that can win are tried.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import ceil
from typing import TypeAlias

DEGREE = 8192  # coefficients of a ring element of the encryption; arith/cheetah_mul.cc, arith/cheetah_dot.cc

Block: TypeAlias = tuple[int, int, int]  # rows, inner and columns of a block


@lru_cache(maxsize=4096)  # an architecture has many products, but few shapes
def best_block(rows: int, inner: int, columns: int, *, packed: bool) -> Block:
    """Return the cheapest block shape to multiply rows x inner by inner x columns.

    With `packed`, answers are packed and `inner` is cut by powers of two. Of equally cheap shapes the engine takes the
    last in its order, by rows and then by inner dimension.
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
    """Return the number of key switches that pack the answers of such blocks into full ciphertexts."""
    return ceil(rows * columns / DEGREE) * block[1]


def _candidates(rows: int, inner: int, columns: int, *, packed: bool) -> Iterator[Block]:
    """Yield, for each depth and number of row blocks, the one shape that can win."""
    # of heights with as many row blocks, the lowest leaves room for the widest blocks and is the cheapest
    heights = list(_heights(min(DEGREE, rows), rows))
    for deep in _depths(inner, packed=packed):
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


def _depths(inner: int, *, packed: bool) -> Iterable[int]:
    deepest = min(inner, DEGREE)
    return [1 << power for power in range(deepest.bit_length())] if packed else range(1, deepest + 1)
