"""The dealer of protocol `crypten`: a third process that makes the masks of every product and sees no value of a run.

It works as CrypTen's trusted third party does (`mpc/provider/ttp_provider.py` of crypten 0.4.1): parties draw most of
their masks from seeds that the dealer sent them, and the client gets the rest, its share of products of masks. Two
things differ. CrypTen draws from torch's generator, whose state on a CPU comes from 32 bits of a seed: a party that
knows a little of a masked value can try them all. Here masks come from SHAKE-128, or ChaCha20 on a GPU, and a seed of
256 bits. And no party asks for masks: the dealer knows the op graph, runs each distinct op once on zeros to see which
products it takes, and sends what an op needs before the op runs.
"""

import hashlib
import operator
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Size, Tensor

from costmodel.engine.channel import Blob, Peers
from costmodel.engine.crypten_arrays import unsigned_quotient
from costmodel.engine.crypten_cuda import CardDraws, Place
from costmodel.engine.plan import CLIENT
from costmodel.engine.runtime import Traffic
from costmodel.protocols.crypten import DEALER, NUM_PARTIES

SEED_BYTES = 32
AHEAD = 2  # ops that the dealer may be ahead of the client, which bounds the memory of both


class Product(NamedTuple):
    """A product of masks for the dealer to make: a kind in `CORRELATIONS`, shapes of masks, and further arguments."""

    kind: str
    shapes: tuple[Sequence[int], ...]
    arguments: tuple[int, ...] = ()


class Draws:
    """Random 64-bit integers from a seed, the same on every machine; each draw is one call of SHAKE-128 (FIPS 202)."""

    device = torch.device("cpu")

    def __init__(self, seed: bytes) -> None:
        self.seed, self.num_draws = seed, 0

    def __call__(self, shape: Sequence[int]) -> Tensor:
        """Return a tensor of this shape with the next random 64-bit integers."""
        self.num_draws += 1
        digest = hashlib.shake_128(self.seed + self.num_draws.to_bytes(8, "big")).digest(8 * prod(shape))
        return torch.frombuffer(bytearray(digest), dtype=torch.int64).reshape(tuple(shape))


def draws_at(place: Place, seed: Blob) -> Draws | CardDraws:
    """Return the random generator for a seed: ChaCha20 where a GPU is used or emulated, else SHAKE-128."""
    return CardDraws(bytes(seed), place.device) if place.as_on_card else Draws(bytes(seed))


def to_blob(tensor: Tensor) -> Blob:
    """Return a tensor of 64-bit integers as bytes that can be sent."""
    return tensor.contiguous().cpu().numpy().reshape(-1).view(np.uint8).data


def from_blob(blob: Blob, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return, on a device, the tensor of this shape that `to_blob` turned into bytes."""
    return torch.frombuffer(blob, dtype=torch.int64).reshape(tuple(shape)).to(device)


class Correlation(NamedTuple):
    """How the dealer makes a product of masks.

    opened: function that returns a mask from its two shares. function: returns the product of masks, also given further
        arguments. corrected: returns the client's share of the product, from the product and the server's share.
    """

    opened: Callable[[Tensor, Tensor], Tensor]
    function: Callable[..., Tensor]
    corrected: Callable[[Tensor, Tensor], Tensor]


def _quotients(mask: Tensor, divisor: int) -> Tensor:
    return torch.stack((unsigned_quotient(mask, divisor), (mask < 0).long()))


CORRELATIONS = {
    "mul": Correlation(operator.add, operator.mul, operator.sub),
    "matmul": Correlation(operator.add, torch.matmul, operator.sub),
    "square": Correlation(operator.add, torch.square, operator.sub),
    "and": Correlation(operator.xor, operator.and_, operator.xor),
    "quotients": Correlation(operator.add, _quotients, operator.sub),
    "bit": Correlation(operator.xor, lambda mask: mask & 1, operator.sub),
}


def result_shape(kind: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape of a product of kind `kind` in `CORRELATIONS`, given the shapes of its masks."""
    if kind == "quotients":
        return (2, *shapes[0])
    if kind != "matmul":
        return np.broadcast_shapes(*map(tuple, shapes))
    left, right = shapes
    return (*np.broadcast_shapes(tuple(left[:-2]), tuple(right[:-2])), left[-2], right[-1])


class Provider(ABC):
    """A source of shares of random masks and of their products, with the interface of CrypTen's providers."""

    @abstractmethod
    def shares(self, kind: str, *shapes: Size, arguments: tuple[int, ...] = ()) -> list[Tensor]:
        """Return this party's share of one mask of each shape, then of the masks' product by `CORRELATIONS[kind]`."""

    def generate_additive_triple(self, size0: Size, size1: Size, op: str, device: Any = None) -> tuple[Any, ...]:
        return tuple(map(_additive, self.shares(op, size0, size1)))

    def square(self, size: Size, device: Any = None) -> tuple[Any, ...]:
        return tuple(map(_additive, self.shares("square", size)))

    def generate_binary_triple(self, size0: Size, size1: Size, device: Any = None) -> tuple[Any, ...]:
        return tuple(map(_binary, self.shares("and", size0, size1)))

    def B2A_rng(self, size: Size, device: Any = None) -> tuple[Any, ...]:  # noqa: N802
        mask, result = self.shares("bit", size)
        return _additive(result), _binary(mask & 1)


def _additive(share: Tensor) -> Any:
    from crypten.mpc.primitives import ArithmeticSharedTensor

    return ArithmeticSharedTensor.from_shares(share, precision=0)


def _binary(share: Tensor) -> Any:
    from crypten.mpc.primitives import BinarySharedTensor

    return BinarySharedTensor.from_shares(share)


class Masks(Provider):
    """A party's shares of masks, drawn from its seed, and of the masks' products.

    The server draws the latter too; the client receives them from the dealer.
    """

    def __init__(self, rank: int, draws: Draws | CardDraws, peers: Peers) -> None:
        self.rank, self.draws, self.peers = rank, draws, peers
        self.dealt: deque[Blob] = deque()

    def shares(self, kind: str, *shapes: Size, arguments: tuple[int, ...] = ()) -> list[Tensor]:
        masks, shape = [self.draws(shape) for shape in shapes], result_shape(kind, shapes)
        if self.rank != CLIENT:
            return [*masks, self.draws(shape)]
        if not self.dealt:
            self.dealt.extend(self.peers.receive(DEALER).blobs)
        return [*masks, from_blob(self.dealt.popleft(), shape, self.draws.device)]

    def next_op(self) -> None:
        """At the client, tell the dealer, which may be at most AHEAD ops ahead, that an op is done."""
        assert not self.dealt
        if self.rank == CLIENT:
            self.peers.send(DEALER, {"kind": "next"})


class Zeros(Provider):
    """A source of masks that are 0. It records the products that ops ask for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.products: list[Product] = []

    def shares(self, kind: str, *shapes: Size, arguments: tuple[int, ...] = ()) -> list[Tensor]:
        self.products.append(Product(kind, shapes, arguments))
        made = (*shapes, result_shape(kind, shapes))
        return [torch.zeros(tuple(shape), dtype=torch.int64, device=self.device) for shape in made]


class Dealer:
    """The dealer, which sends each party a seed, and draws the same masks as both parties, in the same order."""

    def __init__(self, place: Place, peers: Peers) -> None:
        self.peers, self.ahead = peers, 0
        seeds = [os.urandom(SEED_BYTES) for _ in range(NUM_PARTIES)]
        self.draws = [draws_at(place, seed) for seed in seeds]
        for rank, seed in enumerate(seeds):
            peers.send(rank, {"kind": "seed"}, [seed])

    def deal(self, products: Sequence[Product]) -> Traffic:
        """Send the client, in one message, its shares of the products of an op; return bytes and messages.

        If the dealer is AHEAD ops ahead of the client, wait first until an op is done.
        """
        if self.ahead == AHEAD:
            self.peers.receive(CLIENT)
        else:
            self.ahead += 1
        blobs = []
        for kind, shapes, arguments in products:
            correlation, (first, second) = CORRELATIONS[kind], self.draws
            masks = [correlation.opened(first(shape), second(shape)) for shape in shapes]
            result = correlation.function(*masks, *arguments)
            blobs.append(to_blob(correlation.corrected(result, second(result.shape))))
        if blobs:
            self.peers.send(CLIENT, {"kind": "dealt"}, blobs)
        return Traffic(sum(map(len, blobs)), int(bool(blobs)))

    def end_step(self) -> None:
        """Receive the messages by which the client reports the last ops of a step as done."""
        for _ in range(self.ahead):
            self.peers.receive(CLIENT)
        self.ahead = 0
