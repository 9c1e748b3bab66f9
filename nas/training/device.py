"""The default device of a training, the precision of products on it, and compiled code.

On CUDA, layers and losses of a training step run as compiled code, one piece for each kind of layer.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from nas.attention.cpu_native import own_folder
from nas.model.bf16_products import has_bf16_units
from nas.model.decoder import LayerFunction
from nas.recipe.candidate import Candidate
from nas.recipe.overrides import RecipeChanges
from nas.recipe.recipe import SMALL_SCALES, Precision, Recipe, ScaleName

_log = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]
UNCHANGED = RecipeChanges()
BACKENDS = {"cuda": "inductor"}  # of torch.compile, by type of device; for other types nothing is compiled
MOST_KINDS = 1 << 10  # compiled variants (kind of layer, shapes, precision) in a process; torch's default is 8

F = TypeVar("F", bound=Callable[..., Any])


def usual_device() -> Device:
    """Return cuda if torch can use a GPU, else cpu."""
    return "cuda" if torch.cuda.device_count() else "cpu"


def on_device(changes: RecipeChanges, device: str, scale: ScaleName) -> RecipeChanges:
    """Return the user's changes with the precision that a new training has on a device.

    By default, products are in bfloat16 (weights, sums and loss in float32) on a GPU and, except at SMALL_SCALES, on a
    CPU with units for bfloat16. On a CPU, the precision otherwise stays None. A GPU without such units trains in
    float32 even if bfloat16 was requested. The log says if bfloat16 is chosen on a CPU, or does not suit the device.
    """
    if changes.precision not in (None, "bfloat16"):
        return changes
    if torch.device(device).type == "cpu":
        if changes.precision is None and scale not in SMALL_SCALES and has_bf16_units():
            _log.info(
                "products are in bfloat16, which this CPU multiplies several times as fast as float32; "
                "--recipe.precision float32 overrides this"
            )
            return replace(changes, precision="bfloat16")
        if changes.precision is not None and not has_bf16_units():
            _log.warning("this CPU has no units for bfloat16 products; they are slower than float32 here")
        return changes
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        _log.info(f"{torch.cuda.get_device_name()} is too old for bfloat16 products; training in float32 instead")
        return replace(changes, precision="float32")
    return replace(changes, precision="bfloat16")


def lowered(candidate: Candidate, device: str, changes: RecipeChanges = UNCHANGED) -> Candidate:
    """Return a candidate with the precision of `on_device`. changes: the user's; only their precision is used."""
    precision = on_device(changes, device, candidate.recipe.scale.name).precision
    recipe = candidate.recipe if precision is None else replace(candidate.recipe, precision=precision)
    return replace(candidate, recipe=recipe)


def kind_of(device: str, precision: Precision) -> str:
    """Return the type of a device, or `cpu with bfloat16 units` for bfloat16 products on such a CPU.

    Results of trainings on different kinds may differ by more than the rounding of float32.
    """
    kind = torch.device(device).type
    return f"{kind} with bfloat16 units" if kind == "cpu" and precision == "bfloat16" and has_bf16_units() else kind


def layer_function(recipe: Recipe, device: str) -> LayerFunction:
    """Return the function that calls a layer in a training step: compiled if possible, unless layers are recomputed."""
    return nn.Module.__call__ if recipe.recompute else compiled(_layer, recipe, device, nn.Module.__call__)


def compiled(function: F, recipe: Recipe, device: str, eager: F | None = None) -> F:
    """Return compiled code of a function if the recipe and device allow it, else `eager` (None: the function itself).

    If the code cannot be compiled when it is called, a warning is logged and `eager` is called from then on.
    """
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
    """Return a function that runs layers on tensors without data, to count what a CUDA training stores for gradients.

    It stores as much as compiled code does or, if the recipe does not compile its layers, as much as a plain call does.
    """
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
    _log.warning("layers cannot be compiled, so that steps take longer: %s", reason)


def _layer(layer: nn.Module, stream: Tensor, with_entropies: bool) -> Any:
    return layer(stream, with_entropies)
