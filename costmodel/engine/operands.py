"""The weights that a session's graphs read, as variables: each is shared once, whatever the steps that read it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from costmodel import ops
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.ops import Node, OpGraph

MASKED = (ops.TokenEmbedding, ops.Linear, ops.VocabProjection)  # their weights are factors of matrix products


class Operand(NamedTuple):
    """An operand as the first node that reads it takes it, and the variable that holds it."""

    variable: str
    node: Node
    suffix: str

    def of(self, weights: Weights) -> Array:
        """Its numbers. Raises UserError for a weight that is missing or of another shape."""
        return interpreter.operands(self.node, weights)[self.suffix]

    @property
    def shape(self) -> tuple[int, ...]:
        """Known without the weights."""
        shapes = self.node.op.weight_shapes
        blank = {f"{self.node.model_name}.{suffix}": np.broadcast_to(1.0, shape) for suffix, shape in shapes.items()}
        return tuple(self.of(blank).shape)

    @property
    def is_masked(self) -> bool:
        """Whether semi2k opens it masked, and may keep the mask."""
        return isinstance(self.node.op, MASKED) and self.suffix == "weight"


def weight_variables(node: Node) -> dict[str, str]:
    """The variables of a node's operands by suffix; a table that is read by token has one for each range of them."""
    _, entries = node.op.read or (0, None)
    read = "" if entries is None else f"@{entries.start}-{entries.stop}"
    return {suffix: f"{node.model_name}.{suffix}{read}" for suffix in node.op.weight_shapes}


def operands(graphs: Sequence[OpGraph]) -> Iterator[Operand]:
    """Every operand of the graphs, once."""
    known = set()
    for graph in graphs:
        for node in graph:
            for suffix, variable in weight_variables(node).items():
                if variable not in known:
                    known.add(variable)
                    yield Operand(variable, node, suffix)
