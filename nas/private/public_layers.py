"""Public layers of a private run: their weights must be those of a checkpoint that everybody has."""

from costmodel.deployment.deploy import Deployment
from costmodel.errors import UserError
from nas.private.model import PrivateModel
from search_spaces.lower import lower


def require_public(model: PrivateModel, public_layers: str, checkpoint: PrivateModel) -> None:
    """Both as they are run: what is folded into a layer must be the checkpoint's too.

    Raises UserError for a weight of these layers that is not, bit for bit, the one of its name in the checkpoint.
    """
    assert model.weights is not None
    assert checkpoint.weights is not None
    for node in lower(model.architecture, 1, Deployment(public_layers=public_layers)):
        for suffix in node.op.weight_shapes if node.op.public else ():
            name = f"{node.name}.{suffix}"
            ours, theirs = model.weights[name], checkpoint.weights.get(name)
            if theirs is None or ours.shape != theirs.shape or ours.tobytes() != theirs.tobytes():
                raise UserError(
                    f"--public-layers must have the weights of --public-checkpoint, folded likewise, but {name!r} "
                    f"{'is not in it' if theirs is None else 'differs'} ({model.name}); leave layer {node.layer} out, "
                    "or give the checkpoint that it is of."
                )
