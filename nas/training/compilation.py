"""Compiled layers: on CUDA the layers of a training step run as fused code, one piece for each kind of layer."""

import logging
import os
from functools import cache
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from nas.attention.compile_cpp import own_folder
from nas.model.decoder import LayerFunction
from nas.recipe.recipe import Recipe

BACKENDS = {"cuda": "inductor"}  # by type of device; others are not compiled for
MOST_KINDS = 1 << 10  # of layers, with shapes and precisions, in one process; torch's limit of 8 is for functions

logger = logging.getLogger(__name__)


def layer_function(recipe: Recipe, device: str) -> LayerFunction:
    """Return what runs the layers of a training step: compiled code where that is wanted and possible.

    Layers that are computed again for their gradients are not compiled.
    """
    backend = BACKENDS.get(torch.device(device).type)
    if recipe.compile == "off" or recipe.recompute or backend is None:
        return nn.Module.__call__
    function = compiled = _compiled(backend)

    def run(layer: nn.Module, stream: Tensor, with_entropies: bool) -> Any:
        nonlocal function
        try:
            return function(layer, stream, with_entropies)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            if function is not compiled:
                raise
            reason = " ".join(str(error).splitlines()[:2])
            logger.warning("layers cannot be compiled, so that steps take longer: %s", reason)
            function = nn.Module.__call__
            return function(layer, stream, with_entropies)

    return run


@cache
def _compiled(backend: str) -> LayerFunction:
    """Layers of one kind share their code, also between models; it is kept on disk for other processes and runs."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own_folder("inductor"))
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_KINDS
    torch._functorch.config.force_non_lazy_backward_lowering = True  # so that all errors of a compiler come forward
    return torch.compile(_layer, fullgraph=True, dynamic=False, backend=backend)


def _layer(layer: nn.Module, stream: Tensor, with_entropies: bool) -> Any:
    return layer(stream, with_entropies)
