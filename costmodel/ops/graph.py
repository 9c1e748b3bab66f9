"""The op graph of a model: nodes in execution order."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from costmodel.errors import UserError
from costmodel.ops.attention import Rotary
from costmodel.ops.op import LayerId, Op, Shape

USUAL = {"past_len": 0, "first": 0, "sequences": 1, "groups": 1}  # what an op says nothing of


def shape(op: Op) -> dict[str, int]:
    """The dimensions of an op by name, without flags, forms, offsets of 0 and a single sequence."""
    values = {field.name: getattr(op, field.name) for field in fields(op)}
    return {name: value for name, value in values.items() if type(value) is int and USUAL.get(name) != value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One op of a graph.

    name: unique in its graph, e.g. `layers.3.ffn.up`; after an `@` comes the part of an op that is split.
    inputs: names of the nodes or graph inputs that it reads, in operand order; `tokens` is the model's input.
    """

    name: str
    layer: LayerId
    op: Op
    inputs: tuple[str, ...]

    @property
    def model_name(self) -> str:
        """The op's name in the model, which its weights carry in a state dict."""
        return self.name.partition("@")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A secret that a graph reads beside its tokens, such as the keys and values of earlier tokens."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpGraph:
    """Nodes in execution order; the output of the last one is the logits. inputs: inputs beside `tokens`.

    Raises UserError for a repeated name, an input that no earlier node produces, or a dimension below 1.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...] = ()

    def __post_init__(self) -> None:
        known = {"tokens"} | {graph_input.name for graph_input in self.inputs}
        checked: set[Op] = set()  # layers repeat their ops
        for node in self.nodes:
            if node.name in known:
                raise UserError(f"node names must be unique, but {node.name!r} appears twice.")
            if missing := [name for name in node.inputs if name not in known]:
                raise UserError(f"node {node.name!r} reads {missing}, which no earlier node produces.")
            known.add(node.name)
            if node.op in checked:
                continue
            for name, value in shape(node.op).items():
                if value < 1:
                    raise UserError(f"`{name}` of node {node.name!r} must be at least 1, but got {value}.")
            checked.add(node.op)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)


def output_shapes(graph: OpGraph) -> dict[str, Shape]:
    """Return the shape of every node's output, by name; a rotation's is that of its input."""
    shapes: dict[str, Shape] = {}
    for node in graph:
        shapes[node.name] = shapes[node.inputs[0]] if isinstance(node.op, Rotary) else node.op.output_shape
    return shapes
