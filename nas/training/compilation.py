"""Compiled code: on CUDA layers and losses of a training step run fused, one piece of code for each kind of layer."""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from nas.attention.compile_cpp import own_folder
from nas.model.decoder import LayerFunction
from nas.recipe.recipe import Recipe

BACKENDS = {"cuda": "inductor"}  # by type of device; others are not compiled for
MOST_KINDS = 1 << 10  # of layers, with shapes and precisions, in one process; torch's limit of 8 is for functions

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


def layer_function(recipe: Recipe, device: str) -> LayerFunction:
    """Return the function that runs the layers of a training step; layers that are recomputed are not compiled."""
    return nn.Module.__call__ if recipe.recompute else compiled(_layer, recipe, device, nn.Module.__call__)


def compiled(function: F, recipe: Recipe, device: str, eager: F | None = None) -> F:
    """Return compiled code of a function if it is wanted and possible, else the function, or `eager`."""
    backend, plain = BACKENDS.get(torch.device(device).type), eager or function
    if recipe.compile == "off" or backend is None:
        return plain
    return _or_plain(cast(F, _compiled(function, backend)), plain)


def _or_plain(code: F, plain: F) -> F:
    """Return compiled code that the plain function replaces once it cannot be compiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # imported late: it takes a second

    chosen = code

    def run(*args: Any) -> Any:
        nonlocal chosen
        try:
            return chosen(*args)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            if chosen is not code:
                raise
            _warn(" ".join(str(error).splitlines()[:2]))
            chosen = plain
            return chosen(*args)

    return cast(F, run)


def counted_layer_function(recipe: Recipe) -> LayerFunction:
    """Return a function that stores as much for a layer's gradients as compiled code does, on tensors without data."""
    is_compiled = recipe.compile == "auto" and not recipe.recompute
    return _or_plain(_compiled(_layer, _keeping()), nn.Module.__call__) if is_compiled else nn.Module.__call__


@cache
def _keeping() -> Any:
    """Return a backend that chooses what is stored for gradients, and compiles nothing."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=min_cut_rematerialization_partition)


def _as_it_is(graph: torch.fx.GraphModule, _: object) -> Any:
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(graph.forward)


@cache
def _compiled(function: Callable[..., Any], backend: Any) -> Any:
    """Compile a function. Layers of one kind share their code, also between models; other processes find it on disk."""
    import torch._dynamo
    import torch._functorch.config

    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own_folder("inductor"))
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_KINDS
    torch._functorch.config.force_non_lazy_backward_lowering = True  # so that all compiler errors are raised at once
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


@cache
def _warn(reason: str) -> None:
    logger.warning("layers cannot be compiled, so that steps take longer: %s", reason)


def _layer(layer: nn.Module, stream: Tensor, with_entropies: bool) -> Any:
    return layer(stream, with_entropies)
