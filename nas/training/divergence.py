"""When a run counts as diverged, and where in the model; docs/training.md has both rules.

A run whose last `WINDOW` losses exceed its initial one is worse than untrained, not because of a spike or one batch.
With a distillation schedule, which may remove parts at once, this rule holds only in the second half of the steps.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

MAX_LOSS = math.log(sys.float_info.max)  # nats; the perplexity of a larger loss overflows a float
WINDOW = 10  # steps: a model that learns nothing exceeds by chance once in a thousand


def above_start(losses: Sequence[float], initial: float) -> bool:
    """Whether each of the last `WINDOW` training losses is above the initial one."""
    return len(losses) >= WINDOW and min(losses[-WINDOW:]) > initial


def nonfinite_step(
    objective: nn.Module, batches: Iterable[Tensor], loss: float, gradient_norm: float
) -> tuple[str, str] | None:
    """Return why a step is not finite, as a format string, and the layer; None if the whole step is finite.

    objective: with the gradients of the step. batches: the step's tokens.
    """
    model = objective.get_submodule("model")
    if not math.isfinite(loss):
        return "non-finite loss at step {step}, first in {layer}", first_nonfinite_activation(model, batches)
    if math.isfinite(gradient_norm):
        return None
    if deepest := deepest_nonfinite_gradient(objective):
        return "non-finite gradient at step {step}, first in {layer}", deepest.removeprefix("model.")
    return "gradient norm too large at step {step}, steepest in {layer}", steepest_module(model)


def first_nonfinite_activation(model: nn.Module, batches: Iterable[Tensor]) -> str:
    """Name the first module without submodules, in order of execution, whose output is not finite on these tokens."""
    broken: list[str] = []

    def check(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if not broken and isinstance(output, Tensor) and not output.isfinite().all():
            broken.append(name)

    modules = {name: module for name, module in model.named_modules() if not list(module.children())}
    handles = [module.register_forward_hook(partial(check, name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            for tokens in batches:
                model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return broken[0] if broken else "the model"


def deepest_nonfinite_gradient(model: nn.Module) -> str | None:
    """Name the last module with a non-finite gradient, which back-propagation reached first, or None."""
    names = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return names[-1].rpartition(".")[0] if names else None


def steepest_module(model: nn.Module) -> str:
    """Name the module with the largest gradient norm."""
    norms = {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.grad is not None}
    return max(norms, key=lambda name: (not math.isnan(norms[name]), norms[name])).rpartition(".")[0]
