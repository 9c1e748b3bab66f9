"""Run an `OpGraph` in plaintext, with the functions of ops in `execution.op_functions`.

`operands` and `inputs` prepare the arrays that these functions take, before a run under an engine too.
"""

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from costmodel import ops
from costmodel.config.files import MOST_WEIGHTS, open_file
from costmodel.errors import UserError
from costmodel.execution.op_functions import Array as Array
from costmodel.execution.op_functions import Weights as Weights
from costmodel.execution.op_functions import evaluate, numpy_library
from costmodel.ops import Node, Op, OpGraph, output_shapes


def execute(graph: OpGraph, weights: Weights, tokens: Array | None, caches: Mapping[str, Array] | None = None) -> Array:
    """Return the last node's output, such as logits (tokens x vocab); arguments and errors are those of `values`."""
    return values(graph, weights, tokens, caches)[graph.nodes[-1].name]


def values(
    graph: OpGraph,
    weights: Weights,
    tokens: Array | None,
    caches: Mapping[str, Array] | None = None,
    observe: Callable[..., object] | None = None,
) -> dict[str, Array]:
    """Return a graph's inputs and the outputs of all nodes by name, in plaintext and double precision.

    weights: by `<node>.<suffix>`, as in the model's state dict: scores are divided by a temperature, and the weight of
        a linear is out_features x in_features.
    tokens: ids, as many as the graph was made for; for several sequences, all first tokens, then all second tokens, and
        so on, which is also the order of the rows of logits; None if the graph reads no tokens.
    caches: the graph's other inputs by name; None if it has none.
    observe: called with every node, its `operands` and its inputs, before the node is computed; None to call nothing.

    Raise UserError for a weight or cache that is missing or of another shape, tokens that do not fit the graph, an op
    without a function, or an op of a traced model whose inputs have other shapes than it takes.
    """
    library, shapes = numpy_library(), output_shapes(graph)
    known = inputs(graph, tokens, caches)
    for node in graph:
        read, values = [known[name] for name in node.inputs], operands(node, weights)
        if observe is not None:
            observe(node, values, *read)
        try:
            known[node.name] = evaluate(node.op, library, values, *read)
            fits = known[node.name].size == prod(shapes[node.name])
        except ValueError:  # of numpy, for shapes that do not go together
            fits = False
        if not fits:
            given = ", ".join(f"{name!r} of shape {value.shape}" for name, value in zip(node.inputs, read, strict=True))
            raise UserError(
                f"{type(node.op).__name__} {node.name!r} must read {given} as {node.op.input_shapes}, but no op takes "
                "that part of it; use a linear of its own for each part in the module, or only `estimate` its cost."
            )
    return known


def inputs(graph: OpGraph, tokens: Array | None, caches: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Return a graph's inputs by name: encoded tokens, and caches. Raise UserError if these do not fit the graph."""
    if tokens is None and any("tokens" in node.inputs for node in graph):
        raise UserError("`tokens` must be given for a graph that embeds them, but they are None.")
    arrays = {} if tokens is None else {"tokens": encoded(graph, tokens)}
    for wanted in graph.inputs:
        if caches is None or wanted.name not in caches:
            raise UserError(f"`caches` must hold {wanted.name!r} of shape {wanted.shape}, but it is missing.")
        value = np.asarray(caches[wanted.name], dtype=np.float64)
        if value.shape != wanted.shape:
            raise UserError(f"cache {wanted.name!r} must have the shape {wanted.shape}, but has {value.shape}.")
        arrays[wanted.name] = value
    return arrays


def encoded(graph: OpGraph, tokens: Array) -> Array:
    """Return the tokens one-hot encoded (tokens x vocab), or their ids as doubles if the graph looks them up.

    Raise UserError for a graph that embeds no tokens, another number of tokens, or tokens outside the vocabulary.
    """
    op = next((node.op for node in graph if isinstance(node.op, ops.TokenEmbedding)), None)
    if op is None:
        raise UserError("`tokens` must be None for a graph without an embedding of tokens; give its `caches`.")
    tokens = np.asarray(tokens)
    if tokens.shape != (op.tokens,):
        raise UserError(f"`tokens` must be {op.tokens} integers, as the graph was lowered for, but got {tokens.shape}.")
    if tokens.min() < 0 or tokens.max() >= op.vocab:
        raise UserError(f"`tokens` must be from 0 to {op.vocab - 1}, but got {tokens.min()} to {tokens.max()}.")
    if op.encoding == "lookup":
        return tokens.astype(np.float64)
    one_hot = np.zeros((op.tokens, op.vocab))
    one_hot[np.arange(op.tokens), tokens] = 1.0
    return one_hot


def model_weights(graph: OpGraph) -> dict[str, tuple[Op, str]]:
    """Return, by name of each weight that a graph reads, the op that states its largest shape, and its suffix there."""
    readers: dict[str, tuple[Op, str]] = {}
    for node in graph:
        for suffix, shape in node.op.weight_shapes.items():
            name = f"{node.model_name}.{suffix}"
            if name not in readers or shape > readers[name][0].weight_shapes[suffix]:
                readers[name] = node.op, suffix
    return readers


def operands(node: Node, weights: Weights) -> dict[str, Array]:
    """Return a node's weights by suffix, as the function of its op takes them: sliced, scaled, transposed or inverted.

    Raise UserError if a weight is missing or has another shape.
    """
    op, values = node.op, {}
    for suffix, shape in op.weight_shapes.items():
        name = f"{node.model_name}.{suffix}"
        if name not in weights:
            raise UserError(f"`weights` must hold {name!r} of shape {shape}, but it is missing.")
        value = np.asarray(weights[name], dtype=np.float64)
        axis, entries = op.read or (0, None)
        if op.has_longer_table and value.ndim == len(shape):  # positions beyond the op's tokens are not read
            value = value.take(range(min(shape[axis], value.shape[axis])), axis)
        if value.shape != shape:
            raise UserError(f"weight {name!r} must have the shape {shape}, but has {value.shape}.")
        value = value if entries is None else value.take(entries, axis)
        value = value * op.scale if isinstance(op, ops.TokenEmbedding) and op.scale != 1 else value
        value = value.T if suffix in op.transposed else value
        values[suffix] = 1 / value if suffix in op.inverted else value
    return values


def load_weights(path: Path, graph: OpGraph) -> dict[str, Array]:
    """Return the tensors of a safetensors file that the graph reads, by name, `<node>.<suffix>`.

    Raise UserError if the file cannot be read, or a weight is missing, has another shape or is not finite.
    """
    try:
        open_file(path, MOST_WEIGHTS).close()
        weights = load_file(path)
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise UserError(f"weights file {str(path)!r} must be a readable safetensors file, but: {reason}.") from None
    for node in graph:
        operands(node, weights)
    read = {name: weights[name] for name in model_weights(graph)}
    for name, value in read.items():
        if bad := int(np.size(value) - np.isfinite(value).sum()):
            raise UserError(f"weight {name!r} of {str(path)!r} must be finite, but {bad} of its numbers are not.")
    return read
