"""Predict the peak memory of a party: shares of weights, of inputs, and of outputs that later ops still read.

    peak = sum over features of coefficient x bytes

`features` counts the bytes. The coefficients are fitted (`MemoryTestbed`): the memory of a process per byte of each
feature, and that of a process without a model. Besides shares, an op has temporaries: levels of a comparison, in
proportion to the outputs in memory; masked and opened factors of a matrix product; under cheetah the blocks of a
product, encoded for encryption, and their encrypted results. Memory that an op frees stays with the process for the
next op, so features add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, get_args

from costmodel import ops
from costmodel.config.files import load_file
from costmodel.ops import Node, OpGraph, output_shapes
from costmodel.protocols.cheetah_preprocessing import DEGREE
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.op_programs import calls_of
from costmodel.protocols.primitives import EngineSetting

TESTBEDS = Path(__file__).parents[1] / "testbeds"
Feature = Literal["process", "held", "alive", "matrix", "blocks", "results"]
FEATURES: tuple[Feature, ...] = get_args(Feature)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFit:
    """Fitted peak memory of a process.

    coefficients: bytes per byte of each feature; for the feature `process`, bytes. worst_error: greatest relative error
        on a model of the fit. held_out_error: greatest relative error on a model that was left out of the fit.
    """

    coefficients: dict[str, float]
    worst_error: float
    held_out_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTestbed:
    """Fitted peak memory of processes that ran whole models, with one process per party.

    client: fit of rank 0, which also shares the inputs and, under SPU, compiles the ops. party: fit of the largest of
        the other processes, including the dealer of crypten. greatest: largest value of each feature, in bytes, in any
        fitted model. num_points: number of fitted models. measured_on: the date.
    """

    protocol: str
    engine: str
    ring_bits: int
    machine: str
    measured_on: str
    num_points: int
    greatest: dict[str, int]
    client: MemoryFit
    party: MemoryFit


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """Predicted peak resident bytes of the client's process, and of the largest process of another party.

    held_bytes: bytes of one computing party's shares of weights, inputs and outputs, which are counted and not fitted.
    held_out_error: greatest relative error of the two fits on a model that was left out of them.
    extrapolation: the largest ratio of a feature to its greatest value in the fit, at least 1.
    """

    client_bytes: int
    party_bytes: int
    held_bytes: int
    held_out_error: float
    extrapolation: float


def load_memory(protocol: str) -> MemoryTestbed:
    """Return the package's memory testbed of a protocol. Raise UserError, naming the file, if it cannot be read."""
    return load_file(MemoryTestbed, TESTBEDS / f"memory-{protocol}.yaml")


def peak_memory(graph: OpGraph, setting: EngineSetting, testbed: MemoryTestbed) -> PeakMemory | None:
    """Return predicted peaks; None where none were measured: kept masks, several threads, another device or ring."""
    is_measured = setting.weight_masks == "fresh" and setting.threads == 1 and setting.device == "cpu"
    if not is_measured or setting.ring_bits != testbed.ring_bits:
        return None
    num_bytes = features(graph, testbed.protocol, setting)
    client_bytes, party_bytes = (
        round(sum(fit.coefficients[name] * count for name, count in num_bytes.items()))
        for fit in (testbed.client, testbed.party)
    )
    beyond = [count / testbed.greatest[name] for name, count in num_bytes.items() if testbed.greatest[name]]
    return PeakMemory(
        client_bytes=client_bytes,
        party_bytes=party_bytes,
        held_bytes=num_bytes["held"] + num_bytes["alive"],
        held_out_error=max(testbed.client.held_out_error, testbed.party.held_out_error),
        extrapolation=max(1.0, *beyond),
    )


def last_readers(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return, by name of each node, the outputs that can be dropped after it, because no later node reads them.

    An output that no node reads can be dropped after its own node; the output of the last node is never dropped.
    """
    last = {name: node.name for node in nodes for name in node.inputs}
    spent: dict[str, list[str]] = {node.name: [] for node in nodes}
    for node in nodes[:-1]:
        spent[last.get(node.name, node.name)].append(node.name)
    return spent


def alive_bytes(graph: OpGraph, protocol: str, setting: EngineSetting) -> tuple[int, ...]:
    """Return, for each op in order, the bytes of one party's shares of the outputs in memory, the op's own included."""
    spent, total = last_readers(graph.nodes), 0
    share_bytes = _share_bytes(protocol, setting)
    sizes = {name: share_bytes * prod(shape) for name, shape in output_shapes(graph).items()}
    alive = []
    for node in graph:
        total += sizes[node.name]
        alive.append(total)
        total -= sum(sizes[name] for name in spent[node.name])
    return tuple(alive)


def held_bytes(graph: OpGraph, protocol: str, setting: EngineSetting) -> int:
    """Return the bytes of one party's shares of all hidden weights and inputs, and of its copies of public weights.

    A weight that several ops read, such as the table of a vocabulary in blocks, counts for each op as much as the op
    reads. Weights of the server count too: the engine shares them when an op reads them, and does not free that memory.
    """
    total, share_bytes = 0, _share_bytes(protocol, setting)
    for node in graph:
        word = share_bytes if node.op.hides_weights else setting.ring_bits // 8
        axis, entries = node.op.read or (0, None)
        for shape in node.op.weight_shapes.values():
            total += word * (prod(shape) if entries is None else prod(shape) // shape[axis] * len(entries))
        if isinstance(node.op, ops.TokenEmbedding):
            encoded = node.op.tokens * (1 if node.op.encoding == "lookup" else node.op.vocab)
            total += share_bytes * encoded
    return total + share_bytes * sum(prod(kept.shape) for kept in graph.inputs)


def features(graph: OpGraph, protocol: str, setting: EngineSetting) -> dict[Feature, int]:
    """Return the bytes on which a party's peak depends, by feature.

    process: 1, for the process itself. held: see `held_bytes`. alive: the maximum of `alive_bytes`. matrix: shares of
        both factors and the result of the largest tile of a matrix product.
    blocks, results (0 except under cheetah): the blocks that a product encodes at once, one polynomial each, and the
        ciphertexts to which they add up before packing, two polynomials each. A polynomial has DEGREE coefficients of
        `ring_bits` bits. Each is the largest over all products.
    """
    num_bytes: dict[Feature, int] = {
        "process": 1,
        "held": held_bytes(graph, protocol, setting),
        "alive": max(alive_bytes(graph, protocol, setting)),
        "matrix": 0,
        "blocks": 0,
        "results": 0,
    }
    share_bytes, element_bytes = _share_bytes(protocol, setting), DEGREE * setting.ring_bits // 8
    products = (
        call
        for op in dict.fromkeys(node.op for node in graph)
        for call in calls_of(op, setting, share_bytes=share_bytes)
        if call.factors
    )
    for call in dict.fromkeys(products):
        num_bytes["matrix"] = max(num_bytes["matrix"], share_bytes * (call.elements + call.operands))
        if "results" in (work := ENGINE_PROTOCOLS[protocol].matrix_work((call,))):
            num_bytes["blocks"] = max(num_bytes["blocks"], work["products"] * element_bytes)
            num_bytes["results"] = max(num_bytes["results"], work["results"] * 2 * element_bytes)
    return num_bytes


def _share_bytes(protocol: str, setting: EngineSetting) -> int:
    return ENGINE_PROTOCOLS[protocol].num_shares * setting.ring_bits // 8
