"""What a party holds in memory while a graph runs: shares of weights, of inputs and of what later ops still read.

    peak = sum over features of coefficient x bytes

`features` counts bytes; what the engine's process takes per byte of each, and by itself, is fitted (`MemoryTestbed`).
The shares themselves are exact. Beside them an op has temporaries, each a few times as large as what it works on:
levels of a comparison, as many as outputs that are alive; masked and opened factors of a matrix product; under cheetah
its blocks, encoded for the encryption, and their encrypted results. What an op frees stays with the process, for the
next one, so features add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, get_args

from costmodel import ops
from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from costmodel.ops import Node, Op, OpGraph, output_shapes
from costmodel.protocols.cheetah_packing import DEGREE
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.op_programs import calls_of
from costmodel.protocols.primitives import EngineSetting

TESTBEDS = Path(__file__).parents[1] / "testbeds"
Feature = Literal["process", "held", "alive", "matrix", "blocks", "results"]
FEATURES: tuple[Feature, ...] = get_args(Feature)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFit:
    """What a process takes. coefficients: bytes for a byte of each feature; for `process`, bytes.

    worst_error: greatest relative error on a model it is fitted on. held_out_error: on one that was left out.
    """

    coefficients: dict[str, float]
    worst_error: float
    held_out_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTestbed:
    """Fitted on runs of whole models, a process per party, by the most that each held in a pass.

    client: the first party, which also shares everything beforehand and, under SPU, compiles the ops. party: each
    other, the dealer of crypten included.
    greatest: of each feature, the most of any model that it is fitted on; num_points: such models.
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
    """The most bytes that are resident at once: of the first party, which is also the client, and of each other.

    held_bytes: shares of weights, inputs and outputs among them, exact. held_out_error: of the fit of the rest.
    extrapolation: how many times more of a feature there is than in any model that was measured, at least 1.
    """

    client_bytes: int
    party_bytes: int
    held_bytes: int
    held_out_error: float
    extrapolation: float


def load_memory(protocol: str) -> MemoryTestbed:
    """The committed testbed of a protocol. Raises UserError, naming the file."""
    path = TESTBEDS / f"memory-{protocol}.yaml"
    return decode(MemoryTestbed, load_mapping(path), str(path))


def peak_memory(graph: OpGraph, setting: EngineSetting, testbed: MemoryTestbed) -> PeakMemory | None:
    """Peaks of a run of one thread; None with kept masks of weights, another ring or a card: nobody measured them."""
    if setting.weight_masks == "kept" or setting.threads != 1 or setting.ring_bits != testbed.ring_bits:
        return None
    if getattr(setting, "device", "cpu") != "cpu":
        return None
    num_bytes = features(graph, testbed.protocol, setting)
    beyond = [count / testbed.greatest[name] for name, count in num_bytes.items() if testbed.greatest[name]]
    return PeakMemory(
        client_bytes=_bytes(num_bytes, testbed.client),
        party_bytes=_bytes(num_bytes, testbed.party),
        held_bytes=num_bytes["held"] + num_bytes["alive"],
        held_out_error=max(testbed.client.held_out_error, testbed.party.held_out_error),
        extrapolation=max(1.0, *beyond),
    )


def _bytes(num_bytes: dict[Feature, int], fit: MemoryFit) -> int:
    return round(sum(fit.coefficients[name] * count for name, count in num_bytes.items()))


def last_readers(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """The nodes whose outputs no later one reads, by node; the last one's output is the result."""
    last = {name: node.name for node in nodes for name in node.inputs}
    spent: dict[str, list[str]] = {node.name: [] for node in nodes}
    for node in nodes[:-1]:
        spent[last.get(node.name, node.name)].append(node.name)
    return spent


def alive_bytes(graph: OpGraph, protocol: str, setting: EngineSetting) -> tuple[int, ...]:
    """One party's shares of outputs, its own included, that are there while each op runs, in order."""
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
    """One party's shares of all weights and inputs.

    A weight that several ops read, as those of blocks of the vocabulary are, is held by each as it reads it. Weights
    of the server count as shared: the engine shares them when an op reads them, and the process keeps their place.
    """
    total = 0
    for node in graph:
        word = _share_bytes(protocol, setting) if node.op.hides_weights else setting.ring_bits // 8
        total += word * _read_elements(node.op)
        if isinstance(node.op, ops.TokenEmbedding):
            encoded = node.op.tokens * (1 if node.op.encoding == "lookup" else node.op.vocab)
            total += _share_bytes(protocol, setting) * encoded
    return total + _share_bytes(protocol, setting) * sum(prod(kept.shape) for kept in graph.inputs)


def features(graph: OpGraph, protocol: str, setting: EngineSetting) -> dict[Feature, int]:
    """Bytes that a party's peak grows with.

    process: 1, the process by itself. held: see `held_bytes`. alive: the most of `alive_bytes`. matrix: shares of both
    factors and the result of the largest matrix product, tile by tile. blocks, results: under cheetah, the most blocks
    of a product that are encoded at once, a word a coefficient, and ciphertexts that they add up to, before these are
    packed: two ring elements each.
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


def _read_elements(op: Op) -> int:
    """Elements of an op's weights, of a table only those that it reads."""
    axis, entries = op.read or (0, None)
    shapes = op.weight_shapes.values()
    return sum(prod(shape) if entries is None else prod(shape) // shape[axis] * len(entries) for shape in shapes)
