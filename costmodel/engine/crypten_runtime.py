"""A party's runtime under CrypTen: ops run on the arrays of `crypten_arrays`, with masks that the dealer makes.

Parties open values to each other on the channels on which they met, not through torch.distributed. So bytes are counted
where they are sent, a lost party is noticed at once, and no further port is open.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from costmodel.engine.channel import Blob, Peers
from costmodel.engine.crypten_arrays import LIBRARY, SECRET_FUNCTIONS, Secret, imported_crypten
from costmodel.engine.crypten_cuda import ExactProducts, place_of, require_room
from costmodel.engine.crypten_dealer import Dealer, Masks, Product, Zeros, draws_at, from_blob, to_blob
from costmodel.engine.plan import CLIENT, Assignment, variables
from costmodel.engine.programs import operand_shapes, weight_variables
from costmodel.engine.runtime import Runtime, Traffic
from costmodel.execution.engine_arithmetic import SCALED
from costmodel.execution.op_functions import Array
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.crypten import DEALER, NUM_PARTIES, WEIGHT_SCALE, CryptenSetting


class Alone:
    """CrypTen's communicator for the dealer. The dealer runs ops by itself, on zeros, so that nothing is sent."""

    def get_rank(self) -> int:
        return CLIENT

    def get_world_size(self) -> int:
        return NUM_PARTIES

    def all_reduce(self, input: Any, op: Any = torch.distributed.ReduceOp.SUM, batched: bool = False) -> Any:
        """Return a copy of the tensor (if `batched`, of each tensor in a list), which stands for the opened values."""
        return [tensor.clone() for tensor in input] if batched else input.clone()


class Link(Alone):
    """CrypTen's communicator for a party: both parties open values to each other at the same time.

    `all_reduce` returns the sum of both parties' tensors or, for an `op` other than SUM, their exclusive or.
    """

    def __init__(self, rank: int, peers: Peers) -> None:
        self.rank, self.peers = rank, peers
        self.sent_bytes = self.messages = 0

    def get_rank(self) -> int:
        return self.rank

    def all_reduce(self, input: Any, op: Any = torch.distributed.ReduceOp.SUM, batched: bool = False) -> Any:
        own: list[Tensor] = input if batched else [input]
        blobs = list(map(to_blob, own))
        self.peers.send(NUM_PARTIES - 1 - self.rank, {"kind": "opened"}, blobs)
        self.sent_bytes, self.messages = self.sent_bytes + sum(map(len, blobs)), self.messages + 1
        others = self.peers.receive(NUM_PARTIES - 1 - self.rank).blobs
        is_sum, results = op == torch.distributed.ReduceOp.SUM, []
        for tensor, blob in zip(own, others, strict=True):
            other = from_blob(blob, tensor.shape, tensor.device)
            results.append(other.add_(tensor) if is_sum else other.bitwise_xor_(tensor))
        return results if batched else results[0]


class CryptenRuntime(Runtime):
    """The runtime of a computing party or of the dealer under CrypTen."""

    def __init__(self, assignment: Assignment, peers: Peers) -> None:
        self.rank, self.peers, self.setting = assignment.rank, peers, assignment.setting
        assert isinstance(self.setting, CryptenSetting)
        self.place = place_of(self.setting.device, self.rank)
        self.on_machine = len(assignment.addresses) if isinstance(assignment.addresses[0], str) else 1  # processes
        self.products_of = ExactProducts if self.place.as_on_card else nullcontext
        self.crypten = imported_crypten()
        self.crypten.cfg.encoder.precision_bits = self.setting.fraction_bits
        self.link = Link(self.rank, peers)
        self.dealer: Dealer | None = None
        self.masks: Masks | None = None
        self.products: dict[Op, list[Product]] = {}  # products that each kind of op takes, for the dealer
        self.known: dict[str, Any] = {}
        self.pasts: list[dict[str, str]] = []
        self.steps: tuple[OpGraph, ...] = ()
        self.done: list[Traffic] = []

    def shares(self, value: Array, op: Op | None = None) -> list[Any]:
        """Return shares (64-bit integers) or public weights (doubles); matrices of `SCALED` ops times WEIGHT_SCALE."""
        value = np.asarray(value, dtype=np.float64)
        if isinstance(op, SCALED) and value.ndim == 2:
            value = value * WEIGHT_SCALE
        if op is not None and not op.hides_weights:
            return [value] * NUM_PARTIES
        encoded = np.rint(value * 2.0**self.setting.fraction_bits).astype(np.int64)
        mask = np.frombuffer(os.urandom(encoded.nbytes), dtype=np.int64).reshape(encoded.shape)
        return [mask, np.asarray(encoded - mask)]

    def packed(self, share: Any) -> list[bytes]:
        np.save(buffer := BytesIO(), share, allow_pickle=False)
        return [buffer.getvalue()]

    def unpacked(self, parts: Sequence[Blob]) -> Any:
        return np.load(BytesIO(parts[0]), allow_pickle=False)

    def opened(self, shares: Sequence[Any]) -> Array:
        first, second = shares
        return (first + second) * 2.0**-self.setting.fraction_bits

    def prepare(self, steps: tuple[OpGraph, ...]) -> None:
        require_room(steps, self.place, self.on_machine, self.setting)
        self.pasts = [variables(graph) if step else {} for step, graph in enumerate(steps)]
        self.steps = steps

    def connect(self) -> None:
        """As the dealer, send each party a seed for its masks; as a party, receive that seed."""
        torch.set_num_threads(self.setting.threads)
        if self.rank == DEALER:
            self.dealer = Dealer(self.place, self.peers)
            self.crypten.communicator.get = Alone
            return
        (seed,) = self.peers.receive(DEALER).blobs
        self.masks = Masks(self.rank, draws_at(self.place, seed), self.peers)
        self.crypten.mpc.get_default_provider = lambda: self.masks
        self.crypten.communicator.get = lambda: self.link

    def hold(self, values: Mapping[str, Any]) -> None:
        self.known |= {name: self._held(value) for name, value in values.items()}

    def _held(self, value: Array) -> Any:
        """Return doubles, which are public numbers, unchanged, and a share as a secret."""
        if value.dtype == np.float64:
            return value
        return Secret(self.crypten.mpc.MPCTensor.from_shares(torch.from_numpy(value).to(self.place.device)))

    def start(self) -> None:
        """At the dealer, find out which products every op needs, so that no step has to wait for that."""
        for node in (node for graph in self.steps for node in graph if self.dealer is not None):
            self._products(node)

    def run(self, step: int, index: int, node: Node) -> None:
        if self.dealer is not None:
            with self.products_of():
                self.done.append(self.dealer.deal(self._products(node)))
            return
        assert self.masks is not None
        self.link.sent_bytes = self.link.messages = 0
        weights = {suffix: self.known[name] for suffix, name in weight_variables(node).items()}
        sources = [self.known[self.pasts[step].get(name, name)] for name in node.inputs]
        self.known[node.name] = self._evaluated(node.op, weights, sources)
        self.masks.next_op()
        self.done.append(Traffic(self.link.sent_bytes, self.link.messages, self.link.messages))

    def _evaluated(self, op: Op, weights: Mapping[str, Any], sources: Sequence[Any]) -> Any:
        with self.crypten.no_grad(), self.products_of():
            return SECRET_FUNCTIONS[type(op)](op, LIBRARY, weights, *sources)

    def _products(self, node: Node) -> list[Product]:
        """Return the products that an op takes, found by running it on zeros."""
        if node.op not in self.products:
            zeros = Zeros(self.place.device)
            self.crypten.mpc.get_default_provider = lambda: zeros
            blank = {name: np.zeros(shape) for name, shape in operand_shapes(node).items()}
            weights = {name: self._held(self.shares(value, node.op)[0]) for name, value in blank.items()}
            if not node.op.is_local:
                sources = [self._held(np.zeros(shape, dtype=np.int64)) for shape in node.op.input_shapes]
                self._evaluated(node.op, weights, sources)
            self.products[node.op] = zeros.products
        return self.products[node.op]

    def share(self, variable: str) -> Any:
        return None if self.rank == DEALER else self.known[variable].tensor.share.cpu().numpy()

    def drop(self, variable: str) -> None:
        self.known.pop(variable, None)

    def traffic(self, num_ops: int) -> list[Traffic]:
        done, self.done = self.done, []
        assert len(done) == num_ops
        if self.dealer is not None:
            self.dealer.end_step()
        return done

    def peak_bytes(self) -> int | None:
        """Return the process's peak resident bytes or, on a GPU, torch's peak bytes there since the process started."""
        on_card = self.place.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.place.device) if on_card else super().peak_bytes()

    def stop(self) -> None:
        self.known.clear()
