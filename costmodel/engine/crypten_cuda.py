"""CrypTen on GPUs: exact products of integers, random masks, and an estimate of the GPU memory that a party needs.

CUDA does not multiply matrices of 64-bit integers, so these products are computed exactly from products of doubles.
CrypTen's own class for this (`CUDALongTensor`) wraps tensors, lacks some of their functions and takes 10 products; here
tensors stay tensors, and 6 products are enough. SHAKE-128 is too slow on a GPU, so masks are a key stream of ChaCha20.
Everything but the kernels also runs on a CPU, with device `emulated`.
"""

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from costmodel.config.units import format_bytes
from costmodel.engine.programs import operands
from costmodel.errors import UserError
from costmodel.execution.memory import alive_bytes
from costmodel.ops import OpGraph, output_shapes
from costmodel.protocols.primitives import EngineSetting

DIGIT_BITS, NUM_DIGITS = 22, 3
LONGEST = 2048  # a sum of this many products of digits, each at most 2^42, fits the 53 bits of a double
BLOCKS = {"cuda": 1 << 19, "cpu": 1 << 10}  # blocks of ChaCha20 made at once; a GPU is slow for small arrays
CONSTANTS = b"expand 32-byte k"
WORD_BYTES = 8
PROCESS_BYTES = 1 << 30  # GPU memory of a process without a model: CUDA's context, and masks made ahead
COPIES = 16  # memory that an op needs, as a multiple of its operands: masks, opened numbers, digits, comparisons


class Place(NamedTuple):
    """Where a party computes. as_on_card: whether products and masks are made as on a GPU, even on a CPU."""

    device: torch.device
    as_on_card: bool


def place_of(device: str, rank: int) -> Place:
    """Return where party `rank` computes; ranks take turns over several GPUs. Raise UserError as `check_device`."""
    check_device(device)
    if device == "cuda":
        return Place(torch.device("cuda", rank % torch.cuda.device_count()), as_on_card=True)
    return Place(torch.device("cpu"), as_on_card=device == "emulated")


def exact_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the product (... x m x n) of 64-bit integers (... x m x k) and (... x k x n), modulo 2^64.

    It is exact, and computed from products of doubles: a number is split into three digits in base 2^22, from -2^21 to
    2^21. Products of digits that count as multiples of 2^64 are left out.
    """
    shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    total = torch.zeros(shape, dtype=torch.int64, device=left.device)
    for start in range(0, left.shape[-1], LONGEST):
        lefts = _digits(left[..., start : start + LONGEST])
        rights = _digits(right[..., start : start + LONGEST, :])
        for i in range(NUM_DIGITS):
            for j in range(NUM_DIGITS - i):
                total += torch.matmul(lefts[i], rights[j]).long() << DIGIT_BITS * (i + j)
    return total


def _digits(numbers: Tensor) -> list[Tensor]:
    """Split integers into digits, as doubles, lowest first; only the lowest 20 bits of the last digit matter."""
    digits, half = [], 1 << DIGIT_BITS - 1
    for _ in range(NUM_DIGITS - 1):
        digit = ((numbers + half) & (1 << DIGIT_BITS) - 1) - half
        digits.append(digit.double())
        numbers = (numbers - digit) >> DIGIT_BITS
    return [*digits, numbers.double()]


class ExactProducts(TorchFunctionMode):
    """A context in which torch computes matrix products of 64-bit integers with `exact_matmul`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and args[0].dtype == torch.int64:
            return exact_matmul(*args)
        return func(*args, **(kwargs or {}))


class UnwrappedLong:
    """A replacement for CrypTen's wrapper of integers on a GPU, which returns the plain tensor."""

    cat, stack = staticmethod(torch.cat), staticmethod(torch.stack)

    def __new__(cls, tensor: Tensor) -> Any:
        return tensor


class CardDraws:
    """Random words for parties on a GPU: the key stream of ChaCha20 for a seed of 256 bits.

    Source: RFC 8439, section 2.3, with Bernstein's counter of 64 bits and no nonce, because a seed serves one session.
    """

    def __init__(self, seed: bytes, device: torch.device) -> None:
        self.device, self.counter, self.num_blocks = device, 0, BLOCKS[device.type]
        words = struct.unpack("<12i", CONSTANTS + seed)
        self.rows = torch.tensor(words, dtype=torch.int32, device=device).reshape(3, 4, 1)
        self.left = torch.empty(0, dtype=torch.int64, device=device)

    def __call__(self, shape: Sequence[int]) -> Tensor:
        """Return the next 64-bit integers of the key stream as a tensor of this shape."""
        missing, parts = prod(shape), list[Tensor]()
        while missing > len(self.left):
            parts.append(self.left)
            missing -= len(self.left)
            self.left = self._next_blocks()
        parts.append(self.left[:missing])
        self.left = self.left[missing:]
        return torch.cat(parts).reshape(tuple(shape))

    def _next_blocks(self) -> Tensor:
        numbers = torch.arange(self.counter, self.counter + self.num_blocks, device=self.device)
        self.counter += self.num_blocks
        counters = torch.stack((numbers, numbers >> 32, *[torch.zeros_like(numbers)] * 2)).int()
        first = [*(row.expand(4, self.num_blocks) for row in self.rows), counters]  # each 4 words x blocks
        a, b, c, d = (row.clone() for row in first)
        for _ in range(10):
            b, d = _quarter_rounds(a, b, c, d)  # of columns
            b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
            b, d = _quarter_rounds(a, b, c, d)  # of diagonals
            b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
        words = torch.cat([row + last for row, last in zip(first, (a, b, c, d), strict=True)])
        return words.t().contiguous().view(torch.int64).flatten()  # block after block


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Do four quarter rounds at once, one per word of the rows; change a and c in place, return the new b and d."""
    for rotate_d, rotate_b in ((16, 12), (8, 7)):
        a += b
        d = _rotated(d ^ a, rotate_d)
        c += d
        b = _rotated(b ^ c, rotate_b)
    return b, d


def _rotated(words: Tensor, num_bits: int) -> Tensor:
    return (words << num_bits) | ((words >> 32 - num_bits) & (1 << num_bits) - 1)


def check_device(device: str) -> None:
    """Raise UserError if `device` is `cuda` and torch finds no GPU here."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device cuda needs a GPU with CUDA, but torch {torch.__version__} finds none; leave it out.")


def require_room(steps: Sequence[OpGraph], place: Place, num_processes: int, setting: EngineSetting) -> None:
    """Raise UserError if the parties that share a GPU are estimated to need more memory than the GPU has.

    `num_processes` is the number of parties on this machine, the dealer included. Nothing is checked on a CPU.
    """
    if place.device.type != "cuda":
        return
    sharing = -(-num_processes // torch.cuda.device_count())
    needed = sharing * card_bytes(steps, setting)
    if needed > (have := torch.cuda.get_device_properties(place.device).total_memory):
        raise UserError(
            f"a card must have {format_bytes(needed)} for {sharing} of the parties, but {place.device} has "
            f"{format_bytes(have)}; leave --device out, or shorten the prompt."
        )


def card_bytes(steps: Sequence[OpGraph], setting: EngineSetting) -> int:
    """Return an estimate of a party's peak GPU bytes: process, shares, and COPIES times what an op reads and makes."""
    held, most = sum(prod(operand.shape) for operand in operands(steps)), 0
    for graph in steps:
        shapes = output_shapes(graph)
        for node, alive in zip(graph, alive_bytes(graph, "crypten", setting), strict=True):
            touched = (shapes[node.name], *node.op.input_shapes, *node.op.weight_shapes.values())
            most = max(most, alive + COPIES * WORD_BYTES * sum(map(prod, touched)))
    return PROCESS_BYTES + WORD_BYTES * held + most
