"""Layers that are no secret in a private run: their weights must be those of a checkpoint that everybody has."""

import math
from collections.abc import Iterator

import numpy as np

from costmodel.deployment.client_layers import halves
from costmodel.deployment.deploy import Deployment
from costmodel.errors import UserError
from costmodel.ops import Node
from nas.private.model import PrivateModel
from search_spaces.architecture import Architecture
from search_spaces.lower import lower

WRITERS = ("embed", "position", ".attention.out", ".ffn.down", ".ffn.fused")  # to the stream, as their names end


def require_public(
    model: PrivateModel, public_layers: str | None, client_layers: int | None, checkpoint: PrivateModel
) -> None:
    """Both models as they are run: what is folded into a layer must be the checkpoint's too; what writes to the stream,
    that times the power of two by which the streams of both differ (`nas.conversion.stream_scale`; squared, epsilons
    do). Of a model whose weights are elsewhere the shapes are compared.

    Raises UserError for layers that the model does not have, a weight of them that is not, bit for bit, the one of its
    name in the checkpoint, or streams that differ otherwise, or in a model whose weights are elsewhere.
    """
    assert checkpoint.weights is not None
    scale = math.sqrt(model.architecture.norm_epsilon / checkpoint.architecture.norm_epsilon)
    if math.frexp(scale)[0] != 0.5 or (scale != 1 and model.weights is None):
        raise UserError(
            f"the stream of --public-checkpoint must differ from the model's by a power of two, and not at all at a "
            f"party without weights, but does by {scale:g} ({model.name}); give the checkpoint that it is of, or the "
            f"export with its weights."
        )
    for node in _known(model.architecture, public_layers, client_layers):
        for suffix, shape in node.op.weight_shapes.items():
            name, factor = f"{node.name}.{suffix}", scale if node.name.endswith(WRITERS) else 1.0
            theirs = checkpoint.weights.get(name)
            if theirs is None or not (
                theirs.shape == shape if model.weights is None else np.array_equal(model.weights[name], theirs * factor)
            ):
                raise UserError(
                    f"public layers and the client's must have the weights of --public-checkpoint, folded likewise, "
                    f"but {name!r} {'is not in it' if theirs is None else 'differs'} ({model.name}); leave layer "
                    f"{node.layer} out, or give the checkpoint that it is of."
                )


def _known(architecture: Architecture, public_layers: str | None, client_layers: int | None) -> Iterator[Node]:
    """Every node whose weights are no secret."""
    graph = lower(architecture, architecture.context, Deployment(public_layers=public_layers))
    at_client = () if client_layers is None else halves(graph, client_layers).client.nodes
    return (node for node in graph if node.op.public or node in at_client)
