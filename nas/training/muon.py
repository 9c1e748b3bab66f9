"""The optimizer Muon: momentum with orthogonalised matrices. Matrices of equal shape are processed together.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Steps are scaled as in Liu et al.
2025, arXiv 2502.16982, section 2.2, so that AdamW's learning rates and weight decay can be used.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95  # both sources
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al.: singular values end between about 0.7 and 1.2
NEWTON_SCHULZ_STEPS = 5
ADAMW_RMS = 0.2  # arXiv 2502.16982: root mean square of an entry of AdamW's step, in learning rates


class Muon(torch.optim.Optimizer):
    """Muon for the weights of linears, out_features x in_features.

    As in torch's fused optimizers, a step changes nothing if the attribute `found_inf` is a tensor of 1.

    weights: pairs of a weight and the number of equally large matrices stacked in it (3 for queries, keys and values).
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
            held = [weight for weight in group["params"] if weight.grad is not None]
            moved += [(weight, self._look_ahead(weight), group) for weight in held]
        moved.sort(key=lambda move: _size(move[0], move[2]["packed"]))
        for (short, long), alike in groupby(moved, key=lambda move: _size(move[0], move[2]["packed"])):
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

    def _look_ahead(self, weight: nn.Parameter) -> Tensor:
        """Return Nesterov's momentum of a weight: the running mean of gradients, updated twice with the present one."""
        assert weight.grad is not None
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum: Tensor = state["momentum"]
        gradient = weight.grad if self.found_inf is None else torch.where(self.found_inf > 0, momentum, weight.grad)
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Approximate the nearest matrices with orthonormal rows. matrices: n x short x long, with short <= long.

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


def _size(weight: Tensor, packed: int) -> tuple[int, int]:
    rows, columns = weight.shape[0] // packed, weight.shape[1]
    return min(rows, columns), max(rows, columns)


def _matrices(source: Tensor, packed: int) -> Tensor:
    """Return the matrices of a weight, transposed if needed: packed x short x long."""
    matrices = source.view(packed, -1, source.shape[1])
    return matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT
