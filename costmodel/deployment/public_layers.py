"""Marks layers whose weights all parties know, such as those of a public checkpoint without fine-tuning."""

import re
from dataclasses import replace

from costmodel.errors import UserError
from costmodel.ops import LayerId, OpGraph

ENDS: tuple[LayerId, ...] = ("embed", "head")
LAYERS = re.compile("([0-9]{1,4})(?:-([0-9]{1,4}))?")


def public_layers(text: str) -> frozenset[LayerId]:
    """Return the layers of `0-5,7,embed`: numbers from 0, inclusive ranges, `embed` and `head`.

    A UserError is raised for any other text.
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
    """Return the graph with all weights of these layers public; a UserError is raised if the model lacks a layer."""
    last = max((node.layer for node in graph if isinstance(node.layer, int)), default=-1)
    if missing := layers - {node.layer for node in graph} - {*range(last)}:  # a layer in between may have no ops left
        raise UserError(
            f"`public_layers` must be layers of the model, whose last one is {last}, but has "
            f"{', '.join(sorted(map(str, missing)))}; leave out what it does not have."
        )
    public = {op: replace(op, public=op.weights == "hidden") for op in dict.fromkeys(node.op for node in graph)}
    return replace(
        graph, nodes=tuple(replace(node, op=public[node.op]) if node.layer in layers else node for node in graph)
    )
