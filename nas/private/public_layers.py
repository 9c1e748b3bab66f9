"""Checks layers that are not secret in a private run: their weights must be those of a public checkpoint."""

import math

import numpy as np

from costmodel.deployment.client_layers import halves
from costmodel.deployment.deploy import Deployment
from costmodel.errors import UserError
from nas.private.model import PrivateModel
from search_spaces.lower import lower

WRITERS = ("embed", "position", ".attention.out", ".ffn.down", ".ffn.fused")  # to the stream, by the ends of names


def require_public(
    model: PrivateModel, public_layers: str | None, client_layers: int | None, checkpoint: PrivateModel
) -> None:
    """Check that layers that are not secret have the checkpoint's weights, bit for bit, in both models as they run.

    What is folded into a layer must be the checkpoint's too. Weights that write to the stream may differ by the power
    of two between both streams (`nas.conversion.verified_fold`; epsilons by its square). If the model's weights are
    elsewhere, only shapes are compared, and the streams must be equal. Raise UserError for a missing layer or any other
    difference.
    """
    assert checkpoint.weights is not None
    scale = math.sqrt(model.architecture.norm_epsilon / checkpoint.architecture.norm_epsilon)
    if math.frexp(scale)[0] != 0.5 or (scale != 1 and model.weights is None):
        raise UserError(
            f"the stream of --public-checkpoint must differ from the model's by a power of two, and not at all at a "
            f"party without weights, but does by {scale:g} ({model.name}); give the checkpoint that it is of, or the "
            f"export with its weights."
        )
    architecture = model.architecture
    graph = lower(architecture, architecture.context, Deployment(public_layers=public_layers))
    at_client = () if client_layers is None else halves(graph, client_layers).client.nodes
    for node in (node for node in graph if node.op.public or node in at_client):
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
