"""A party's runtime of CrypTen: the functions that compute ops in plaintext run on `Secret` arrays.

Some ops have a function of their own here (`OWN_FUNCTIONS`). Parties open values to each other on the channels on which
they met, in place of torch.distributed: what is sent is counted where it is sent, a lost party is noticed at once, and
no further port is open. Only processes of parties import CrypTen.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from costmodel import ops
from costmodel.engine import crypten_functions
from costmodel.engine.assignment import CLIENT, Assignment
from costmodel.engine.channel import Blob, Peers
from costmodel.engine.crypten_cuda import ExactProducts, UnwrappedLong, place_of, require_room
from costmodel.engine.crypten_dealer import Dealer, Masks, Product, Zeros, draws_at, from_blob, to_blob
from costmodel.engine.plan import variables
from costmodel.engine.programs import operand_shapes, weight_variables
from costmodel.engine.runtime import Runtime, Traffic
from costmodel.execution.op_functions import FUNCTIONS, GELU_FORMS, Array, Library
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.crypten import CryptenSetting
from costmodel.protocols.crypten_primitives import DEALER, NUM_PARTIES


@functools.cache
def imported_crypten() -> Any:
    """Return CrypTen with some of its parts replaced.

    Its converter of ONNX is not needed, and imports what torch no longer has. Looking up its configuration took half of
    a party's time; here that is plain data. Integers on a GPU are plain tensors. Shares of 0 are 0, because both
    parties know the seeds of theirs.
    """
    found = find_spec("crypten")
    assert found is not None
    assert found.origin is not None
    configuration = yaml.safe_load((Path(found.origin).parents[1] / "configs" / "default.yaml").read_text())
    parts: dict[str, dict[str, Any]] = {
        "nn.onnx_converter": dict.fromkeys(("from_onnx", "from_pytorch", "from_tensorflow", "TF_AND_TF2ONNX")),
        "config": {"cfg": _plain(configuration)},
        "cuda": {"CUDALongTensor": UnwrappedLong},
    }
    for name, content in parts.items():
        vars(part := ModuleType(f"crypten.{name}")).update(content)
        sys.modules.setdefault(part.__name__, part)
    import crypten
    from crypten.mpc.primitives import ArithmeticSharedTensor, BinarySharedTensor

    for kind in (ArithmeticSharedTensor, BinarySharedTensor):
        kind.PRZS = functools.partial(_shares_of_zero, kind)

    return crypten


def _plain(value: Any) -> Any:
    """Return nested mappings as objects whose attributes are their entries."""
    return SimpleNamespace(**{key: _plain(part) for key, part in value.items()}) if isinstance(value, dict) else value


def _shares_of_zero(kind: Any, size: Sequence[int], device: torch.device | None = None) -> Any:
    return kind.from_shares(torch.zeros(tuple(size), dtype=torch.int64, device=device))


class Secret:
    """A tensor of CrypTen with those parts of numpy's interface that the functions of ops use."""

    __array_ufunc__ = None  # so that arrays of numpy leave operators to it
    __hash__ = None  # type: ignore[assignment]
    dtype = np.float64

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.size())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> "Secret":
        return Secret(self.tensor[key])

    def reshape(self, *shape: Any) -> "Secret":
        return Secret(self.tensor.reshape(*shape))

    def transpose(self, *axes: int) -> "Secret":
        return Secret(self.tensor.permute(*axes))

    def sum(self, axis: int, keepdims: bool) -> "Secret":
        return Secret(self.tensor.sum(axis, keepdim=keepdims))

    def max(self, axis: int, keepdims: bool) -> "Secret":
        assert (axis, keepdims) == (-1, True)
        return Secret(crypten_functions.maximum(self.tensor))

    def masked(self, mask: Tensor) -> "Secret":
        """Return the product with public bits, which is exact."""
        masked = self.tensor.clone()
        masked.share = masked.share * mask.to(masked.share.device)
        return Secret(masked)

    def __neg__(self) -> "Secret":
        return Secret(-self.tensor)

    def __add__(self, other: Any) -> "Secret":
        return Secret(self.tensor + self._raw(other))

    def __sub__(self, other: Any) -> "Secret":
        return Secret(self.tensor - self._raw(other))

    def __mul__(self, other: Any) -> "Secret":
        """Multiply, but divide by n in place of a public factor 1/n, which has few bits in fixed point."""
        if isinstance(other, Scaled):
            return Secret((self.tensor * other.tensor).div(other.scale))
        if isinstance(other, float) and other and abs((divisor := 1 / other) - round(divisor)) < 1e-9:
            return Secret(self.tensor.div(round(divisor)))
        return Secret(self.tensor * self._raw(other))

    def __rtruediv__(self, numerator: int) -> "Scaled":
        """Divide 1 by a positive secret; the functions of ops have no other quotients."""
        assert numerator == 1
        return Scaled(crypten_functions.reciprocal(self.tensor), crypten_functions.INVERSE_SCALE)

    def __lt__(self, other: Any) -> "Secret":
        return Secret(self.tensor < self._raw(other))

    def __eq__(self, other: Any) -> "Secret":  # type: ignore[override]
        return Secret(self.tensor.eq(self._raw(other)))

    __radd__, __rmul__ = __add__, __mul__

    def matmul(self, right: Any) -> "Secret":
        return Secret(self.tensor.matmul(self._raw(right)))

    def _raw(self, value: Any) -> Any:
        """Return an operand as CrypTen takes it, on the device of this tensor."""
        if isinstance(value, np.ndarray):
            return torch.tensor(value, dtype=torch.float64, device=self.tensor.share.device)
        return value.tensor if isinstance(value, Secret) else value


class Scaled(Secret):
    """A secret, held times `scale`. The functions of ops only add public numbers to it, or multiply a secret by it."""

    def __init__(self, tensor: Any, scale: int) -> None:
        super().__init__(tensor)
        self.scale = scale

    def __add__(self, other: Any) -> "Scaled":
        return Scaled(self.tensor + other * self.scale, self.scale)


class SecretNumpy:
    """The functions of numpy that the functions of ops call, on secrets and public arrays."""

    tile = staticmethod(np.tile)  # of public weights only
    square = staticmethod(lambda source: Secret(source.tensor.square()))
    exp = staticmethod(lambda source: Secret(crypten_functions.exponential(source.tensor)))
    tanh = staticmethod(lambda source: Secret(crypten_functions.logistic(source.tensor * 2) * 2 - 1))

    @staticmethod
    def matmul(left: Array, right: Array) -> Array:
        if isinstance(left, Secret):
            return left.matmul(right)
        return right.transpose(1, 0).matmul(left.T).transpose(1, 0)

    @staticmethod
    def maximum(source: Secret, least: float) -> Secret:
        assert least == 0
        return Secret(source.tensor.relu())

    @staticmethod
    def where(condition: Array, chosen: Any, other: Any) -> Secret:
        """Choose by a public mask, or by secret bits if `other` is 0."""
        if isinstance(condition, Secret):
            assert other == 0
            return condition.__mul__(chosen)
        mask = torch.from_numpy(condition.astype(np.int64))
        parts = [part for part in ((chosen, mask), (other, 1 - mask)) if isinstance(part[0], Secret) or part[0] != 0]
        kept = [value.masked(bits) if isinstance(value, Secret) else value * bits.numpy() for value, bits in parts]
        secret, *others = sorted(kept, key=lambda part: not isinstance(part, Secret))
        total: Secret = functools.reduce(Secret.__add__, others, secret)
        return total

    @staticmethod
    def concatenate(parts: Sequence[Secret], axis: int) -> Secret:
        return Secret(imported_crypten().cat([part.tensor for part in parts], dim=axis))

    @staticmethod
    def stack(parts: Sequence[Secret]) -> Secret:
        return Secret(imported_crypten().stack([part.tensor for part in parts]))

    @staticmethod
    def repeat(source: Secret, times: int, axis: int) -> Secret:
        every = torch.arange(source.shape[axis], device=source.tensor.share.device)
        return Secret(source.tensor.index_select(axis, every.repeat_interleave(times)))


def _logistic(op: Any, library: Library, weights: Any, source: Secret) -> Secret:
    return Secret(crypten_functions.logistic(source.tensor))


# op type -> the function that replaces the one of FUNCTIONS
OWN_FUNCTIONS: dict[type, Callable[..., Secret]] = {
    ops.Sigmoid: _logistic,
    ops.Gelu: lambda op, library, weights, source: (
        Secret(crypten_functions.gelu(source.tensor)) if op.form == "tanh" else GELU_FORMS[op.form](library, source)
    ),
    ops.Silu: lambda op, library, weights, source: source * _logistic(op, library, weights, source),
}


class SecretLibrary(Library):
    """The functions that ops need, on secrets."""

    def mean_square(self, source: Secret) -> Secret:
        return Scaled(crypten_functions.mean_square(source.tensor), crypten_functions.MEAN_SCALE)


class Alone:
    """CrypTen's communicator for the dealer, which runs ops on zeros: nothing is sent."""

    def get_rank(self) -> int:
        return CLIENT

    def get_world_size(self) -> int:
        return NUM_PARTIES

    def all_reduce(self, input: Any, op: Any = torch.distributed.ReduceOp.SUM, batched: bool = False) -> Any:
        """Return the sum, or the exclusive or, of both parties' tensors; of several at once if `batched`."""
        return [tensor.clone() for tensor in input] if batched else input.clone()


class Link(Alone):
    """CrypTen's communicator for a party: both parties open values to each other at the same time."""

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
    """The runtime of a party that computes, or of the dealer."""

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
        self.functions = FUNCTIONS | OWN_FUNCTIONS
        self.library = SecretLibrary(
            numpy=SecretNumpy,
            erf=lambda source: Secret(source.tensor.erf()),
            rsqrt=lambda source: Scaled(crypten_functions.inverse_root(source.tensor), crypten_functions.ROOT_SCALE),
        )

    def shares(self, value: Array, op: Op | None = None) -> list[Any]:
        """Return integers of 64 bits for secrets; for weights that all parties know, the numbers themselves."""
        value = np.asarray(value, dtype=np.float64)
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
        require_room(steps, self.place, self.on_machine)
        self.pasts = [variables(graph) if step else {} for step, graph in enumerate(steps)]
        self.steps = steps

    def connect(self) -> None:
        """Get the dealer's seed, which is a party's only secret besides its shares; or start the dealer."""
        torch.set_num_threads(self.setting.threads)
        if self.rank == DEALER:
            self.dealer = Dealer(self.place, self.peers)
            self.crypten.communicator.get = Alone
            return
        (seed,) = self.peers.receive(DEALER).blobs
        self.masks = self._provide(Masks(self.rank, draws_at(self.place, seed), self.peers))
        self.crypten.communicator.get = lambda: self.link

    def _provide(self, provider: Any) -> Any:
        self.crypten.mpc.get_default_provider = lambda: provider
        return provider

    def hold(self, values: Mapping[str, Any]) -> None:
        self.known |= {name: self._held(value) for name, value in values.items()}

    def _held(self, value: Array) -> Any:
        """Return numbers that all parties know as they are, and a share as a secret."""
        is_public = value.dtype == np.float64
        if is_public:
            return value
        return Secret(self.crypten.mpc.MPCTensor.from_shares(torch.from_numpy(value).to(self.place.device)))

    def start(self) -> None:
        """Have the dealer find out what every op needs, so that no step waits for it."""
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
            return self.functions[type(op)](op, self.library, weights, *sources)

    def _products(self, node: Node) -> list[Product]:
        """Return the products that an op takes, found by running it on zeros."""
        if node.op not in self.products:
            zeros = self._provide(Zeros(self.place.device))
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
        """Return the peak memory; on a GPU, that since the party began."""
        on_card = self.place.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.place.device) if on_card else super().peak_bytes()

    def stop(self) -> None:
        self.known.clear()
