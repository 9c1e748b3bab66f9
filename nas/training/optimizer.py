"""The optimizer of each parameter, the learning rate of each step, and optimizer states as named tensors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from nas.recipe.recipe import Recipe

UNDECAYED = ("thresholds", "log_weight")  # ends of names: have two dimensions, but are not weights of a linear
MOMENTUM = 0.95  # of `Muon`, in both sources that its docstring names
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al.: singular values end between about 0.7 and 1.2
NEWTON_SCHULZ_STEPS = 5
ADAMW_RMS = 0.2  # arXiv 2502.16982: root mean square of an entry of AdamW's step, in learning rates


def optimizers(module: nn.Module, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Return AdamW for all parameters that require gradients or, with optimizer `muon`, AdamW and Muon in this order.

    With `muon`, Muon trains the weights of the layers' linears, and AdamW the rest; without such linears there is no
    Muon. The learning rate is the recipe's peak, on a GPU as a tensor. Weight decay: see `decays`.

    Source: training code of arXiv 2410.13060, which has no weight decay for biases, norms or gains.
    """
    named = {name: value for name, value in module.named_parameters() if value.requires_grad}
    linears = {name: weight for name, weight in named.items() if ".layers." in f".{name}" and decays(name, weight)}
    if recipe.optimizer == "adamw" or not linears:
        return (adamw_over([(value, decays(name, value)) for name, value in named.items()], recipe),)
    rest = adamw_over([(value, decays(name, value)) for name, value in named.items() if name not in linears], recipe)
    owners = {name: name.partition(".parametrizations.")[0].removesuffix(".weight") for name in linears}
    weights = [(weight, _num_matrices(module, owners[name])) for name, weight in linears.items()]
    return rest, Muon(weights, lr=_rate(recipe, weights[0][0].is_cuda), weight_decay=recipe.weight_decay)


def _num_matrices(module: nn.Module, linear: str) -> int:
    """Return the number of equal matrices stacked in a linear: of keys, of values, and of as many queries at a time."""
    owner, _, name = linear.rpartition(".")
    if name == "qkv":
        widths: Any = module.get_submodule(owner).widths
        return int(sum(widths) // widths[-1])
    return 2 if name == "qk" else 1


def decays(name: str, parameter: Tensor) -> bool:
    """Whether a parameter has weight decay, as weights of linears and embedding tables do."""
    return parameter.ndim >= 2 and not name.endswith(UNDECAYED)


def adamw_over(parameters: Iterable[tuple[nn.Parameter, bool]], recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW with the recipe's settings. parameters: pairs of a parameter and whether it has weight decay."""
    pairs = list(parameters)
    is_cuda = any(parameter.is_cuda for parameter, _ in pairs)  # where steps may be captured as a graph
    decayed, rest = ([parameter for parameter, its in pairs if its == is_decayed] for is_decayed in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=_rate(recipe, is_cuda),
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        fused=True,
        capturable=is_cuda,
    )
    # fused steps do not count as changes of a parameter, by which its copy in bf16 is renewed (`rounded`)
    optimizer.register_step_post_hook(lambda *_: increment_version(decayed + rest))
    return optimizer


def _rate(recipe: Recipe, is_cuda: bool) -> float | Tensor:
    """Return the peak learning rate, on a GPU as a tensor, so that a captured step reads its present value."""
    return torch.tensor(recipe.scale.learning_rate, device="cuda") if is_cuda else recipe.scale.learning_rate


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of `step`, from 0: linear warm-up, then decay to `final_rate_share` x peak."""
    scale = recipe.scale
    if step < scale.warmup_steps:
        return scale.learning_rate * (step + 1) / scale.warmup_steps
    progress = (step - scale.warmup_steps) / max(1, scale.num_steps - scale.warmup_steps)
    left = 1 - progress if recipe.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return scale.learning_rate * (recipe.final_rate_share + (1 - recipe.final_rate_share) * left)


def state_tensors(module: nn.Module, moving: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the optimizers' state on the CPU by name, such as `exp_avg.<parameter>`."""
    return {
        f"{kind}.{name}": value.cpu()
        for name, parameter in module.named_parameters()
        for optimizer in moving
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(
    module: nn.Module, moving: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    """Set the state to a result of `state_tensors`. Tensors are copied, since a file's may lack torch's alignment."""
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


class Muon(torch.optim.Optimizer):
    """Muon for the weights of linears, out_features x in_features: steps along the orthogonalised momentum.

    As in torch's fused optimizers, a step changes nothing if the attribute `found_inf` is a tensor of 1.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Steps are scaled as in Liu et
    al. 2025, arXiv 2502.16982, section 2.2, so that AdamW's learning rates and weight decay can be used.

    weights: pairs of a weight and the number of equally large matrices stacked in it, such as queries, keys and values.
        The state is one buffer per weight, `momentum`.
    """

    found_inf: Tensor | None = None

    def __init__(self, weights: Iterable[tuple[nn.Parameter, int]], *, lr: float | Tensor, weight_decay: float) -> None:
        by_packed = sorted(weights, key=lambda pair: pair[1])
        groups = [
            {"params": [weight for weight, _ in group], "packed": packed}
            for packed, group in groupby(by_packed, key=lambda pair: pair[1])
        ]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every weight that has a gradient. closure: never called."""
        moved: list[tuple[Tensor, Tensor, dict[str, Any]]] = []  # matrices of a weight, its momentum, its group
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:  # Nesterov's momentum: updated twice with the present gradient
                    gradient, state = weight.grad, self.state[weight]
                    if not state:
                        state["momentum"] = torch.zeros_like(weight)
                    momentum: Tensor = state["momentum"]
                    if self.found_inf is not None:
                        gradient = torch.where(self.found_inf > 0, momentum, gradient)
                    momentum.lerp_(gradient, 1 - MOMENTUM)
                    moved.append((weight, gradient.lerp(momentum, MOMENTUM), group))
        moved.sort(key=lambda move: _matrix_size(move[0], move[2]["packed"]))
        for (short, long), alike in groupby(moved, key=lambda move: _matrix_size(move[0], move[2]["packed"])):
            members = list(alike)
            steps = orthogonalised(torch.cat([_matrices(momentum, group["packed"]) for _, momentum, group in members]))
            steps *= ADAMW_RMS * max(short, long) ** 0.5
            parts = torch.split(steps, [group["packed"] for _, _, group in members])
            for (weight, _, group), step in zip(members, parts, strict=True):
                wide = step if weight.shape[0] // group["packed"] <= weight.shape[1] else step.mT
                rate, change = group["lr"], wide.reshape(weight.shape)
                target = weight if self.found_inf is None else weight.clone()
                target.mul_(1 - rate * group["weight_decay"])
                if isinstance(rate, Tensor):
                    target.sub_(change * rate)
                else:
                    target.add_(change, alpha=-rate)
                if self.found_inf is not None:
                    weight.copy_(torch.where(self.found_inf > 0, weight, target))


def orthogonalised(matrices: Tensor) -> Tensor:
    """Return approximately the nearest matrices with orthonormal rows. matrices: n x short x long, with short <= long.

    Iterates X <- (a + b XX' + c (XX')^2) X of NEWTON_SCHULZ. XX' and the factors commute, so the iteration is done on
    the short x short matrices XX', and X is multiplied once by the product of all factors.
    """
    unit = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    gram = unit @ unit.mT
    identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    product = identity.expand_as(gram)
    for step in range(NEWTON_SCHULZ_STEPS):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) + a * identity
        product = factor @ product if step else factor
        gram = factor @ gram @ factor
    nearest: Tensor = product @ unit
    return nearest


def _matrix_size(weight: Tensor, packed: int) -> tuple[int, int]:
    rows, columns = weight.shape[0] // packed, weight.shape[1]
    return min(rows, columns), max(rows, columns)


def _matrices(source: Tensor, packed: int) -> Tensor:
    """Return the matrices of a weight, transposed if needed: packed x short x long."""
    matrices = source.view(packed, -1, source.shape[1])
    return matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
