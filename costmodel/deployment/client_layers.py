"""The first layers at the client, which has their weights: it computes them in the clear, and shares the stream."""

from typing import NamedTuple

from costmodel.errors import UserError
from costmodel.ops import Input, OpGraph, output_shapes


class Halves(NamedTuple):
    """client: what it computes from its tokens; the last node is the stream, which `private` reads as an input."""

    client: OpGraph
    private: OpGraph


def halves(graph: OpGraph, num_layers: int) -> Halves:
    """The graph cut behind its embedding and so many layers.

    Raises UserError for more than it has, below 0, or where the rest reads more than one tensor of them.
    """
    most = 1 + max((node.layer for node in graph if isinstance(node.layer, int)), default=-1)
    if not 0 <= num_layers <= most:
        raise UserError(
            f"`client_layers` must be from 0, the embedding alone, to the {most} layers of the model, but got "
            f"{num_layers}."
        )
    layers = {"embed", *range(num_layers)}
    ours = {node.name for node in graph if node.layer in layers}
    client = [node for node in graph if node.name in ours]
    private = [node for node in graph if node.name not in ours]
    stream, *others = dict.fromkeys(name for node in private for name in node.inputs if name in ours)
    if others:
        raise UserError(
            f"`client_layers` must be cut from the rest at one tensor, the stream, but with {num_layers} that reads "
            f"{', '.join((stream, *others))}; choose another number."
        )
    read = {name for node in client for name in node.inputs}
    kept = tuple(graph_input for graph_input in graph.inputs if graph_input.name not in read)
    return Halves(
        client=OpGraph(
            nodes=tuple(client), inputs=tuple(graph_input for graph_input in graph.inputs if graph_input.name in read)
        ),
        private=OpGraph(nodes=tuple(private), inputs=(Input(name=stream, shape=output_shapes(graph)[stream]), *kept)),
    )
