"""What the parties of an engine run are given to do: ops in order, on arrays by name. Free of the engine itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.errors import UserError
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.derived import NUM_PARTIES
from costmodel.protocols.primitives import EngineSetting


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """nodes: in order. inputs: what they read from outside, by name; operands: their own arrays, by node and suffix.

    Raises UserError for a protocol that no engine runs.
    """

    protocol: str
    setting: EngineSetting
    nodes: tuple[Node, ...]
    inputs: Mapping[str, Array]
    operands: Mapping[str, Mapping[str, Array]]

    def __post_init__(self) -> None:
        if self.protocol not in NUM_PARTIES:
            raise UserError(f"an engine protocol must be one of {', '.join(NUM_PARTIES)}, but got {self.protocol!r}.")

    @property
    def num_parties(self) -> int:
        return NUM_PARTIES[self.protocol]


def graph_job(
    graph: OpGraph,
    weights: Weights,
    tokens: Array,
    caches: Mapping[str, Array] | None = None,
    *,
    protocol: str,
    setting: EngineSetting,
) -> Job:
    """One forward pass of a sequence; weights, tokens and caches as `interpreter.execute` takes them.

    Raises UserError for an unknown protocol or inputs that do not fit the graph.
    """
    return Job(
        protocol=protocol,
        setting=setting,
        nodes=graph.nodes,
        inputs=interpreter.inputs(graph, tokens, caches),
        operands={node.name: interpreter.operands(node, weights) for node in graph},
    )


def ops_job(ops: Sequence[Op], *, protocol: str, setting: EngineSetting) -> Job:
    """Each op by itself, on random numbers. Raises UserError for an unknown protocol."""
    generator = np.random.default_rng(0)
    nodes: list[Node] = []
    inputs: dict[str, Array] = {}
    operands: dict[str, dict[str, Array]] = {}
    for index, op in enumerate(ops):
        name = f"{index}.{type(op).__name__}"
        shapes = {f"{name}.input.{position}": shape for position, shape in enumerate(op.input_shapes)}
        inputs |= {key: generator.standard_normal(shape) for key, shape in shapes.items()}
        nodes.append(Node(name=name, layer=0, op=op, inputs=tuple(shapes)))
        # far from 0, since some are divisors
        drawn = {f"{name}.{key}": generator.uniform(0.5, 1.5, shape) for key, shape in op.weight_shapes.items()}
        operands[name] = interpreter.operands(nodes[-1], drawn)
    return Job(protocol=protocol, setting=setting, nodes=tuple(nodes), inputs=inputs, operands=operands)
