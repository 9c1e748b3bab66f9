"""The weights of a decoder by node of its op graph: which there are, their shapes, how many, and their values."""

from collections.abc import Callable

import torch
from torch import Tensor

from costmodel import ops
from costmodel.ops import Op
from nas.model import Decoder
from search_spaces.architecture import Architecture
from search_spaces.lower import lower

Shapes = dict[str, tuple[int, ...]]


def _linear(op: ops.Linear) -> Shapes:
    weight: Shapes = {"weight": (op.out_features, op.in_features)}
    return {**weight, "bias": (op.out_features,)} if op.bias else weight


# Weights of each op type, by suffix to the node's name; an op that is not here has none.
WEIGHT_SHAPES: dict[type, Callable[..., Shapes]] = {
    ops.TokenEmbedding: lambda op: {"weight": (op.vocab, op.features)},
    ops.PositionEmbedding: lambda op: {"weight": (op.rows, op.features)},
    ops.LayerNorm: lambda op: {"weight": (op.features,), "bias": (op.features,)},
    ops.Linear: _linear,
    ops.Temperature: lambda op: {"weight": (op.heads, op.queries)},
    ops.LeakyRelu: lambda op: {"slope": (1,)},
    ops.ScaledAdd: lambda op: {"alpha": (), "beta": ()},
    ops.VocabProjection: lambda op: {"weight": (op.vocab, op.features)},
}


def weight_shapes(op: Op) -> Shapes:
    """The shapes of an op's weights; of a position or temperature table, the rows the op reads."""
    return WEIGHT_SHAPES[type(op)](op) if type(op) in WEIGHT_SHAPES else {}


def num_parameters(architecture: Architecture) -> int:
    """Trained numbers of an architecture over its whole context, a tied output table counted once."""
    graph = lower(architecture, architecture.context)
    nodes = [node for node in graph if not (architecture.tied_embeddings and isinstance(node.op, ops.VocabProjection))]
    return sum(torch.Size(shape).numel() for node in nodes for shape in weight_shapes(node.op).values())


def deployed_weights(model: Decoder) -> dict[str, Tensor]:
    """Detached weights by `<node>.<suffix>`, as an executor of the op graph reads them.

    These are the state dict's tensors but for the temperatures: the state dict holds ln t, this holds t.
    """
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    for name in [name for name in weights if name.endswith(".temperature.log_weight")]:
        weights[name.removesuffix("log_weight") + "weight"] = weights.pop(name).exp()
    return weights
