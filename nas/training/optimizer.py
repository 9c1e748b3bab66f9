"""Optimizers by parameter, the learning rate by step, and optimizer states as named tensors."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from nas.recipe.recipe import Recipe
from nas.training.muon import Muon

PACKED = {"qkv": 3, "qk": 2}  # linears that stack several matrices
UNDECAYED = ("thresholds", "log_weight")  # have two dimensions, but are no weights of a linear


def optimizers(module: nn.Module, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Return AdamW for every parameter or, with `muon`, for all but the weights of the layers' linears.

    Source of what decays: arXiv 2410.13060's training code, which does not decay biases, norms or gains.
    """
    named = {name: value for name, value in module.named_parameters() if value.requires_grad}
    linears = {name: weight for name, weight in named.items() if ".layers." in f".{name}" and decays(name, weight)}
    linears = {name: weight for name, weight in linears.items() if weight.shape[1] > 1}  # row lengths have one column
    if recipe.optimizer == "adamw" or not linears:
        return (adamw_over([(value, decays(name, value)) for name, value in named.items()], recipe),)
    rest = adamw_over([(value, decays(name, value)) for name, value in named.items() if name not in linears], recipe)
    owners = {name: name.partition(".parametrizations.")[0].removesuffix(".weight") for name in linears}
    weights = [(weight, PACKED.get(owners[name].rpartition(".")[2], 1)) for name, weight in linears.items()]
    rate = _rate(recipe, weights[0][0].is_cuda)
    return rest, Muon(weights, lr=rate, weight_decay=recipe.weight_decay)


def decays(name: str, parameter: Tensor) -> bool:
    """Whether the parameter is a linear's weight or an embedding table."""
    return parameter.ndim >= 2 and not name.endswith(UNDECAYED)


def adamw_over(parameters: Iterable[tuple[nn.Parameter, bool]], recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW with the recipe's settings for parameters, each with whether it decays."""
    pairs = list(parameters)
    is_cuda = any(parameter.is_cuda for parameter, _ in pairs)  # where steps may be captured as a graph
    decayed, rest = ([parameter for parameter, its in pairs if its == is_decayed] for is_decayed in (True, False))
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=_rate(recipe, is_cuda),
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        fused=True,
        capturable=is_cuda,
    )


def _rate(recipe: Recipe, is_cuda: bool) -> float | Tensor:
    """Return the first learning rate, on a GPU as a tensor, so that a captured step reads its present value."""
    return torch.tensor(recipe.scale.learning_rate, device="cuda") if is_cuda else recipe.scale.learning_rate


def set_rate(moving: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of all parameters."""
    for optimizer in moving:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the rate of step 0, 1, ...: linear warm-up to the peak, then the recipe's schedule to its final share."""
    scale = recipe.scale
    if step < scale.warmup_steps:
        return scale.learning_rate * (step + 1) / scale.warmup_steps
    progress = (step - scale.warmup_steps) / max(1, scale.num_steps - scale.warmup_steps)
    left = 1 - progress if recipe.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return scale.learning_rate * (recipe.final_rate_share + (1 - recipe.final_rate_share) * left)


def state_tensors(module: nn.Module, moving: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the optimizers' state on the CPU, named `exp_avg.<parameter>` and so on."""
    return {
        f"{kind}.{name}": value.cpu()
        for name, parameter in module.named_parameters()
        for optimizer in moving
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(
    module: nn.Module, moving: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Restore the result of `state_tensors`, as copies, because tensors from a file may lack torch's alignment."""
    named = dict(module.named_parameters())
    owners = {
        parameter: optimizer
        for optimizer in moving
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, value in tensors.items():
        kind, _, of = name.partition(".")
        if of in named:
            owners[named[of]].state[named[of]][kind] = value.clone().to(named[of].device)
