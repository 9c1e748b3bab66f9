"""Weights of an op graph from a safetensors file, checked before anything runs on them."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from costmodel.errors import UserError
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array
from costmodel.ops import OpGraph


def load_weights(path: Path, graph: OpGraph) -> dict[str, Array]:
    """The tensors of a file by name, `<node>.<suffix>` as `interpreter` takes them; names no node has are left.

    Raises UserError for a file that cannot be read, or a weight that is missing, of another shape or not finite.
    """
    try:
        weights = load_file(path)
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"weights file {str(path)!r} must be a readable safetensors file, but: {error}.") from None
    for node in graph:
        interpreter.operands(node, weights)
    read = {name: weights[name] for name in interpreter.model_weights(graph)}
    for name, value in read.items():
        if bad := int(np.size(value) - np.isfinite(value).sum()):
            raise UserError(f"weight {name!r} of {str(path)!r} must be finite, but {bad} of its numbers are not.")
    return read
