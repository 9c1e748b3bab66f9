"""A party of CrypTen, a process: runs a graph op by op, and reads the communicator's own counters after each.

Ops are computed by the functions that compute them in the clear, on `Secret` arrays, but for what CrypTen has a
function of its own for (`OWN_FUNCTIONS`).
"""

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from costmodel import ops
from costmodel.engine.crypten import JOB, RENDEZVOUS, PartyCost, PartyJob, PartyResult
from costmodel.engine.memory import peak_bytes
from costmodel.execution import interpreter
from costmodel.execution.op_functions import FUNCTIONS, Array, Library
from costmodel.protocols.crypten_primitives import NUM_PARTIES


def imported_crypten() -> Any:
    """CrypTen without its converter of ONNX, which imports what torch has no longer, and which nothing here needs."""
    converter = ModuleType("crypten.nn.onnx_converter")
    names = ("from_onnx", "from_pytorch", "from_tensorflow", "TF_AND_TF2ONNX")
    vars(converter).update(dict.fromkeys(names))
    sys.modules.setdefault(converter.__name__, converter)
    import crypten

    return crypten


class Secret:
    """A tensor of CrypTen, as an array of numpy would be asked by the functions of ops, and no further."""

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
        return Secret(self.tensor.max(dim=axis, keepdim=keepdims)[0])

    def __neg__(self) -> "Secret":
        return Secret(-self.tensor)

    def __add__(self, other: Any) -> "Secret":
        return Secret(self.tensor + _raw(other))

    def __sub__(self, other: Any) -> "Secret":
        return Secret(self.tensor - _raw(other))

    def __mul__(self, other: Any) -> "Secret":
        """A public 1/n is rounded in few bits; division by n is not."""
        if isinstance(other, float) and other and abs((divisor := 1 / other) - round(divisor)) < 1e-9:
            return Secret(self.tensor.div(round(divisor)))
        return Secret(self.tensor * _raw(other))

    def __rtruediv__(self, numerator: int) -> "Secret":
        """The functions of ops divide by what is positive alone."""
        crypten = imported_crypten()
        with crypten.cfg.temp_override({"functions.reciprocal_all_pos": True}):
            return Secret(self.tensor.reciprocal()) * numerator

    def __lt__(self, other: Any) -> "Secret":
        return Secret(self.tensor < _raw(other))

    def __eq__(self, other: Any) -> "Secret":  # type: ignore[override]
        return Secret(self.tensor.eq(_raw(other)))

    __radd__, __rmul__ = __add__, __mul__


def _raw(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.tensor(value, dtype=torch.float32)
    return value.tensor if isinstance(value, Secret) else value


class SecretNumpy:
    """What the functions of ops call of numpy, on secrets and public arrays."""

    tile = staticmethod(np.tile)  # of public weights alone
    square = staticmethod(lambda source: Secret(source.tensor.square()))
    exp = staticmethod(lambda source: Secret(source.tensor.exp()))
    tanh = staticmethod(lambda source: Secret(source.tensor.tanh()))

    @staticmethod
    def matmul(left: Array, right: Array) -> Array:
        if isinstance(left, Secret):
            return Secret(left.tensor.matmul(_raw(right)))
        return Secret(right.tensor.transpose(0, 1).matmul(_raw(left.T)).transpose(0, 1))

    @staticmethod
    def maximum(source: Secret, least: float) -> Secret:
        assert least == 0
        return Secret(source.tensor.relu())

    @staticmethod
    def where(condition: Array, chosen: Any, other: Any) -> Secret:
        """Chooses by a public mask; or by secret bits, where `other` is 0."""
        kept: Secret = condition * chosen if isinstance(condition, Secret) else chosen * condition.astype(np.float32)
        if isinstance(other, Secret):
            kept += other * (1.0 - condition)
        else:
            assert other == 0
        return kept

    @staticmethod
    def concatenate(parts: Sequence[Secret], axis: int) -> Secret:
        return Secret(imported_crypten().cat([part.tensor for part in parts], dim=axis))

    @staticmethod
    def stack(parts: Sequence[Secret]) -> Secret:
        return Secret(imported_crypten().stack([part.tensor for part in parts]))

    @staticmethod
    def repeat(source: Secret, times: int, axis: int) -> Secret:
        return Secret(source.tensor.index_select(axis, torch.arange(source.shape[axis]).repeat_interleave(times)))


def _logistic(op: Any, library: Library, weights: Any, source: Secret) -> Secret:
    return Secret(source.tensor.sigmoid())


# op type -> what CrypTen has a function of its own for
OWN_FUNCTIONS: dict[type, Callable[..., Secret]] = {
    ops.Sigmoid: _logistic,
    ops.Silu: lambda op, library, weights, source: source * _logistic(op, library, weights, source),
}


def run(job: PartyJob) -> PartyResult:
    """All parties run it at once, within one rendezvous."""
    crypten = imported_crypten()
    library = Library(
        numpy=SecretNumpy, erf=lambda source: Secret(source.tensor.erf()), rsqrt=lambda x: Secret(x.tensor.inv_sqrt())
    )
    functions = FUNCTIONS | OWN_FUNCTIONS
    crypten.cfg.encoder.precision_bits = job.setting.fraction_bits
    crypten.cfg.communicator.verbose = True  # without it, nothing is counted
    known: dict[str, Any] = {name: _shared(crypten, value) for name, value in job.inputs.items()}
    operands = [
        {
            suffix: value if node.op.weights == "public" else _shared(crypten, value)
            for suffix, value in interpreter.operands(node, job.weights).items()
        }
        for node in job.graph
    ]
    costs, communicator = [], crypten.communicator.get()
    with crypten.no_grad():
        for node, weights in zip(job.graph, operands, strict=True):
            communicator.reset_communication_stats()
            begin_s = time.monotonic()
            sources = (known[name] for name in node.inputs)
            known[node.name] = functions[type(node.op)](node.op, library, weights, *sources)
            end_s = time.monotonic()
            counted = communicator.get_communication_stats()
            costs.append(
                PartyCost(counted_bytes=counted["bytes"], rounds=counted["rounds"], begin_s=begin_s, end_s=end_s)
            )
        logits = known[job.graph.nodes[-1].name].tensor.get_plain_text().numpy()
    return PartyResult(logits=logits, by_op=tuple(costs), peak_bytes=peak_bytes())


def _shared(crypten: Any, value: Array) -> Secret:
    """Shares a value of the first party, who holds everything in the clear."""
    return Secret(crypten.cryptensor(torch.tensor(np.asarray(value), dtype=torch.float32), src=0))


def main(folder: Path, rank: str) -> None:
    """Meets the other parties in a folder, runs the job that lies there, and leaves its result."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ |= {
        "WORLD_SIZE": str(NUM_PARTIES),
        "RANK": rank,
        "RENDEZVOUS": (folder / RENDEZVOUS).as_uri(),
        "DISTRIBUTED_BACKEND": "gloo",
        "GLOO_SOCKET_IFNAME": loopback,
    }
    torch.set_num_threads(1)
    imported_crypten().init()
    result = run(pickle.loads((folder / JOB).read_bytes()))
    (folder / rank).write_bytes(pickle.dumps(result))
    os._exit(0)  # threads of gloo may abort a process that ends by itself


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
