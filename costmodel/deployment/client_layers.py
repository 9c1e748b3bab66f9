"""Moves the first layers to the client, which computes them in plaintext and shares the resulting hidden states."""

from typing import NamedTuple

from costmodel.errors import UserError
from costmodel.ops import Input, OpGraph, output_shapes


class Halves(NamedTuple):
    """A graph cut in two: the last node of `client` gives the hidden states, which `private` reads as an input."""

    client: OpGraph
    private: OpGraph


def halves(graph: OpGraph, num_layers: int) -> Halves:
    """Cut the graph after its embedding and `num_layers` layers.

    A UserError is raised if the graph does not have so many layers, or the rest reads more than one tensor of them.
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
