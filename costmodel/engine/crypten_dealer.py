"""The dealer of protocol `crypten`: a third process, which makes masks of every product and sees no number of a run.

It works as CrypTen's trusted third party does (`mpc/provider/ttp_provider.py` of crypten 0.4.1): parties draw most of
their masks from seeds that the dealer sent them, and the client asks for the rest, its share of products of masks. Two
things are ours. CrypTen draws from torch's generator, whose state on a CPU comes from 32 bits of a seed: a party who
knows a little of what is masked can try them all. Masks here come from SHAKE-128 and a seed of 256 bits. And what is
asked travels on the channels that parties have anyway, where a dealer that dies is noticed at once.
"""

import hashlib
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from costmodel.engine.channel import Peers
from costmodel.engine.runtime import Traffic
from costmodel.protocols.crypten_primitives import DEALER, NUM_PARTIES, REQUEST_WORDS

SEED_BYTES = 32
ASK, DEALT, NEXT = "ask", "dealt", "next"  # frames between the client and the dealer
CLIENT = 0


class Draws:
    """Random words from a seed, the same wherever the seed is. Source: FIPS 202, SHAKE-128, a call for each draw."""

    def __init__(self, seed: bytes) -> None:
        self.seed, self.num_draws = seed, 0

    def __call__(self, shape: Sequence[int]) -> Tensor:
        """Integers of 64 bits."""
        self.num_draws += 1
        digest = hashlib.shake_128(self.seed + self.num_draws.to_bytes(8, "big")).digest(8 * prod(shape))
        return torch.frombuffer(bytearray(digest), dtype=torch.int64).reshape(tuple(shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Masks and what the dealer makes of them.

    opened: what two shares of a mask are of. function: of the masks. corrected: the client's share of its result, from
    the result and the server's share.
    """

    opened: Callable[[Tensor, Tensor], Tensor]
    function: Callable[..., Tensor]
    corrected: Callable[[Tensor, Tensor], Tensor]


# in the order of their numbers in requests
CORRELATIONS: dict[str, Correlation] = {
    "mul": Correlation(opened=operator.add, function=operator.mul, corrected=operator.sub),
    "matmul": Correlation(opened=operator.add, function=torch.matmul, corrected=operator.sub),
    "square": Correlation(opened=operator.add, function=torch.square, corrected=operator.sub),
    "and": Correlation(opened=operator.xor, function=operator.and_, corrected=operator.xor),
    "bit": Correlation(opened=operator.xor, function=lambda mask: mask & 1, corrected=operator.sub),
}
KINDS = tuple(CORRELATIONS)


def request(kind: str, shapes: Sequence[Sequence[int]]) -> bytes:
    """Always as long: the kind, the numbers of dimensions of up to two masks, and these."""
    words = np.zeros(REQUEST_WORDS, dtype=np.uint32)
    sizes = [len(shape) for shape in shapes]
    said = [KINDS.index(kind), *sizes, *[0] * (2 - len(sizes)), *(size for shape in shapes for size in shape)]
    words[: len(said)] = said
    return words.tobytes()


def asked(content: bytes) -> tuple[str, list[list[int]]]:
    """The kind and the shapes of a request."""
    kind, first, second, *sizes = np.frombuffer(content, dtype=np.uint32).tolist()
    shapes = [sizes[:first], sizes[first : first + second]]
    return KINDS[kind], shapes if second or kind in (0, 1, 3) else shapes[:1]


def result_shape(kind: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of a product of masks of these shapes."""
    if kind != "matmul":
        return np.broadcast_shapes(*map(tuple, shapes))
    left, right = shapes
    return (*np.broadcast_shapes(tuple(left[:-2]), tuple(right[:-2])), left[-2], right[-1])


class Provider:
    """A party's masks, by the interface of CrypTen's providers."""

    def __init__(self, rank: int, seed: bytes, peers: Peers) -> None:
        self.rank, self.draws, self.peers = rank, Draws(seed), peers
        self.sent_bytes = self.num_requests = 0

    def _shares(self, kind: str, *shapes: Size) -> list[Tensor]:
        """Of masks of these shapes, and of what the dealer makes of them."""
        masks, shape = [self.draws(shape) for shape in shapes], result_shape(kind, shapes)
        if self.rank != CLIENT:
            return [*masks, self.draws(shape)]
        content = request(kind, shapes)
        self.peers.send(DEALER, {"kind": ASK}, [content])
        self.sent_bytes, self.num_requests = self.sent_bytes + len(content), self.num_requests + 1
        (blob,) = self.peers.receive(DEALER).blobs
        return [*masks, torch.frombuffer(bytearray(blob), dtype=torch.int64).reshape(tuple(shape))]

    def generate_additive_triple(self, size0: Size, size1: Size, op: str, device: Any = None) -> tuple[Any, ...]:
        return tuple(map(_additive, self._shares(op, size0, size1)))

    def square(self, size: Size, device: Any = None) -> tuple[Any, ...]:
        return tuple(map(_additive, self._shares("square", size)))

    def generate_binary_triple(self, size0: Size, size1: Size, device: Any = None) -> tuple[Any, ...]:
        return tuple(map(_binary, self._shares("and", size0, size1)))

    def B2A_rng(self, size: Size, device: Any = None) -> tuple[Any, ...]:  # noqa: N802
        mask, result = self._shares("bit", size)
        return _additive(result), _binary(mask & 1)


def _additive(share: Tensor) -> Any:
    from crypten.mpc.primitives import ArithmeticSharedTensor

    return ArithmeticSharedTensor.from_shares(share, precision=0)


def _binary(share: Tensor) -> Any:
    from crypten.mpc.primitives import BinarySharedTensor

    return BinarySharedTensor.from_shares(share)


class Dealer:
    """The process that answers requests. It draws what both parties draw, in the same order."""

    def __init__(self, peers: Peers) -> None:
        self.peers, self.sent_bytes, self.messages = peers, 0, 0
        seeds = [os.urandom(SEED_BYTES) for _ in range(NUM_PARTIES)]
        self.draws = [Draws(seed) for seed in seeds]
        for rank, seed in enumerate(seeds):
            peers.send(rank, {"kind": "seed"}, [seed])

    def serve(self) -> Traffic:
        """Answers what is asked in an op, until the client goes on to the next one."""
        sent_bytes = messages = 0
        while (frame := self.peers.receive(CLIENT)).header["kind"] == ASK:
            kind, shapes = asked(frame.blobs[0])
            correlation, (first, second) = CORRELATIONS[kind], self.draws
            masks = [correlation.opened(first(shape), second(shape)) for shape in shapes]
            result = correlation.function(*masks)
            content = correlation.corrected(result, second(result.shape)).contiguous().numpy().tobytes()
            self.peers.send(CLIENT, {"kind": DEALT}, [content])
            sent_bytes, messages = sent_bytes + len(content), messages + 1
        return Traffic(sent_bytes, messages)
