"""Which correlated randomness an op uses up under `semi2k`: what its dealer makes, primitive by primitive.

Every piece masks what the parties open to each other, so `opened_bytes` of an op's pieces is what `semi2k` sends.

Source: SecretFlow-SPU 0.9.5, libspu/mpc/semi2k/arithmetic.cc, boolean.cc and conversion.cc, calls of `beaver()`
(https://github.com/secretflow/spu).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from costmodel.ops import Op
from costmodel.protocols.op_programs import calls_of
from costmodel.protocols.primitives import Call, EngineSetting, halves, stored_bytes

# piece -> what it is
#   product: a, b and ab of random numbers; square: a and a^2; matrix: A, B and AB
#   cross: ab, where each party knows one factor; and: products of bits; bit: a random bit as a number of the ring
Kind = Literal["product", "square", "matrix", "cross", "and", "bit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Correlated randomness of one kind.

    elements: of the result. bits: of each element of it; of `and` and `bit`, how many bits an element stands for.
    shape: rows, inner and columns of a matrix product; empty for the rest.
    """

    kind: Kind
    elements: int
    bits: int
    shape: tuple[int, ...] = ()


def pieces_of(op: Op, setting: EngineSetting) -> tuple[Piece, ...]:
    """What one op uses up. Raises UserError for an op without a program."""
    calls = calls_of(op, setting, share_bytes=setting.ring_bits // 8)
    return tuple(piece for call in calls for piece in PIECES[call.primitive](call, setting))


def opened_bytes(piece: Piece) -> int:
    """What both parties together open under a piece: a mask for each factor, or for the one number there is."""
    masks = {"product": 2, "and": 2, "square": 1, "cross": 1, "bit": 1}
    if piece.kind == "matrix":
        rows, inner, columns = piece.shape
        return 2 * inner * (rows + columns) * piece.bits // 8
    return 2 * masks[piece.kind] * piece.elements * stored_bytes(piece.bits)


def _product(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    return (Piece(kind="product", elements=call.elements, bits=setting.ring_bits),)


def _square(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    return (Piece(kind="square", elements=call.elements, bits=setting.ring_bits),)


def _matrix(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    rows, columns = call.factors
    shape = (rows, call.operands // (rows + columns), columns)
    return (Piece(kind="matrix", elements=call.elements, bits=setting.ring_bits, shape=shape),)


def _wrap(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    return (Piece(kind="cross", elements=call.elements, bits=8 * max(4, stored_bytes(call.bits))),)


def _and(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    return (_ands(call.elements, call.bits),)


def _carry(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    tree = [_ands(2 * call.elements, bits) for bits in halves(setting)]
    return (_ands(call.elements, setting.ring_bits), *tree)


def _adder(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    levels = (setting.ring_bits - 1).bit_length()
    return (_ands(call.elements, setting.ring_bits), *[_ands(2 * call.elements, setting.ring_bits)] * levels)


def _bits(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    return (Piece(kind="bit", elements=call.elements, bits=call.bits),)


def _zero_test(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    """A mask in both kinds of shares, so bit by bit; ANDs of full words; and the way back to the ring."""
    mask = Piece(kind="bit", elements=call.elements, bits=setting.ring_bits)
    return (mask, *[_ands(call.elements, setting.ring_bits)] * len(halves(setting)), mask)


def _nothing(call: Call, setting: EngineSetting) -> tuple[Piece, ...]:
    return ()


def _ands(elements: int, bits: int) -> Piece:
    return Piece(kind="and", elements=elements, bits=bits)


PIECES: dict[str, Callable[[Call, EngineSetting], tuple[Piece, ...]]] = {
    "multiply": _product,
    "square": _square,
    "matmul": _matrix,
    "truncate": _wrap,
    "msb": _carry,
    "mux": _product,
    "a2b": _adder,
    "b2a": _bits,
    "equal": _zero_test,
    "and": _and,
    "share": _nothing,
    "input": _nothing,
}
