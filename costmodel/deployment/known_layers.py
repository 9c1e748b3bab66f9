"""Layers whose weights parties other than the server know: public layers, and first layers that the client computes.

Public layers are, for example, layers of a public checkpoint without fine-tuning. The client computes the first layers
in plaintext and shares the resulting hidden states.
"""

import re
from dataclasses import replace
from typing import NamedTuple

from costmodel.errors import UserError
from costmodel.ops import Input, LayerId, OpGraph, output_shapes

ENDS: tuple[LayerId, ...] = ("embed", "head")
LAYERS = re.compile("([0-9]{1,4})(?:-([0-9]{1,4}))?")


def public_layers(text: str) -> frozenset[LayerId]:
    """Return the layers that a text such as `0-5,7,embed` names.

    Layers are numbers from 0, inclusive ranges, `embed` and `head`, with commas between. Other text raises UserError.
    """
    layers: set[LayerId] = set()
    for part in text.split(","):
        numbers = LAYERS.fullmatch(part)
        first, last = map(int, (numbers[1], numbers[2] or numbers[1])) if numbers else (0, -1)
        if first > last and part not in ENDS:
            raise UserError(
                f"`public_layers` must be layers from 0, ranges of them, embed or head, with commas between, such as "
                f"0-5,7, but has {part!r}; correct it."
            )
        layers.update(range(first, last + 1), [end for end in ENDS if end == part])
    return frozenset(layers)


def with_public_layers(graph: OpGraph, layers: frozenset[LayerId]) -> OpGraph:
    """Return the graph with all weights of `layers` public; a UserError is raised for a layer that the model lacks."""
    last = _last_layer(graph)
    if missing := layers - {node.layer for node in graph} - {*range(last)}:  # a layer in between may have no ops left
        raise UserError(
            f"`public_layers` must be layers of the model, whose last one is {last}, but has "
            f"{', '.join(sorted(map(str, missing)))}; leave out what it does not have."
        )
    public = {op: replace(op, public=op.weights == "hidden") for op in dict.fromkeys(node.op for node in graph)}
    return replace(
        graph, nodes=tuple(replace(node, op=public[node.op]) if node.layer in layers else node for node in graph)
    )


def _last_layer(graph: OpGraph) -> int:
    return max((node.layer for node in graph if isinstance(node.layer, int)), default=-1)


class Halves(NamedTuple):
    """An op graph cut in two: `private` reads, as an input, hidden states that a node of `client` computes."""

    client: OpGraph
    private: OpGraph


def halves(graph: OpGraph, num_layers: int) -> Halves:
    """Return the two parts of a graph, cut after its embedding and its first `num_layers` layers.

    A UserError is raised if `num_layers` is negative or the graph has fewer layers, or if `private` would be empty or
    read several outputs of `client`.
    """
    most = 1 + _last_layer(graph)
    if not 0 <= num_layers <= most:
        raise UserError(
            f"`client_layers` must be from 0, the embedding alone, to the {most} layers of the model, but got "
            f"{num_layers}."
        )
    layers = {"embed", *range(num_layers)}
    ours = {node.name for node in graph if node.layer in layers}
    client = [node for node in graph if node.name in ours]
    private = [node for node in graph if node.name not in ours]
    if not private:
        raise UserError(
            f"`client_layers` must leave ops to run privately, but got {num_layers}, all of the model; give fewer."
        )
    stream, *others = dict.fromkeys(name for node in private for name in node.inputs if name in ours)
    if others:
        raise UserError(
            f"`client_layers` must be cut from the rest at one tensor, the stream, but with {num_layers} that reads "
            f"{', '.join((stream, *others))}; choose another number."
        )
    read = {name for node in client for name in node.inputs}
    given = tuple(entry for entry in graph.inputs if entry.name in read)
    kept = tuple(entry for entry in graph.inputs if entry.name not in read)
    shared = Input(name=stream, shape=output_shapes(graph)[stream])
    return Halves(OpGraph(nodes=tuple(client), inputs=given), OpGraph(nodes=tuple(private), inputs=(shared, *kept)))
