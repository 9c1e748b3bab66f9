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


def require_public(
    model: PrivateModel, public_layers: str | None, client_layers: int | None, checkpoint: PrivateModel
) -> None:
    """Both models as they are run: what is folded into a layer must be the checkpoint's too, or that times the power of
    two by which the streams of both differ (`nas.conversion.stream_scale`; squared, epsilons do).

    Raises UserError for layers that the model does not have, or a weight of them that is not, bit for bit, the one of
    its name in the checkpoint.
    """
    assert model.weights is not None
    assert checkpoint.weights is not None
    factors = 1.0, math.sqrt(model.architecture.norm_epsilon / checkpoint.architecture.norm_epsilon)
    for node in _known(model.architecture, public_layers, client_layers):
        for suffix in node.op.weight_shapes:
            name = f"{node.name}.{suffix}"
            ours, theirs = model.weights[name], checkpoint.weights.get(name)
            if theirs is None or not any(np.array_equal(ours, theirs * factor) for factor in factors):
                raise UserError(
                    f"public layers and the client's must have the weights of --public-checkpoint, folded likewise, "
                    f"but {name!r} {'is not in it' if theirs is None else 'differs'} ({model.name}); leave layer "
                    f"{node.layer} out, or give the checkpoint that it is of."
                )


def _known(architecture: Architecture, public_layers: str | None, client_layers: int | None) -> Iterator[Node]:
    """Every node whose weights are no secret."""
    graph = lower(architecture, 1, Deployment(public_layers=public_layers))
    at_client = () if client_layers is None else halves(graph, client_layers).client.nodes
    return (node for node in graph if node.op.public or node in at_client)
