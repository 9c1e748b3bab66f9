"""The same op graphs in the clear, one after the other, with what each keeps for the next."""

import numpy as np

from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array, Weights
from costmodel.generation.plan import variables
from costmodel.ops import OpGraph


class ClearRun:
    """A model in the clear and in double precision. weights: as `interpreter.execute` takes them."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._kept: dict[str, Array] = {}

    def logits(self, graph: OpGraph, tokens: Array) -> Array:
        """Of the next step: projected tokens x vocab. Raises UserError for inputs that do not fit the graph."""
        caches = {name: self._kept[variable] for name, variable in variables(graph).items()}
        self._kept = interpreter.values(graph, self.weights, np.asarray(tokens), caches)
        return self._kept[graph.nodes[-1].name]
