"""Frozen norms in training: LayerNorms or RMSNorms, whose deviations are made constants, one norm after another."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nas.recipe.recipe import Freezing

MEMORY = 0.9  # weight of earlier steps in the running mean of deviations


class FrozenNorm(nn.Module):
    """`weight * (x - mean(x)) / sigma + bias`, or `weight * x / sigma` if it is not centred.

    Before the norm is frozen, each row is divided by its own deviation, as in LayerNorm and RMSNorm; afterwards, all
    rows are divided by sigma, the running mean of the deviations seen in training. That mean leaves out position 0,
    unless it is the only one, since its deviation is far from the others' in trained decoders. Validation changes
    nothing. Compiled code contains both cases, and `frozen` selects one, so that freezing needs no new compilation.

    groups: number of equal parts of a row, such as heads of queries, each with its own deviation.
    sigma: the running mean, one per group; 0 before the first step. frozen: 1 or 0, saved with the weights; `is_frozen`
        is the same, readable without waiting for a device. epsilon: added to a row's variance or mean square.

    Source: Baroni et al. 2025, arXiv 2507.02559, for frozen deviations and the first position.
    """

    sigma: Tensor
    frozen: Tensor
    seen: Tensor  # sum and number of the mean deviations that compiled code has seen since the last step

    def __init__(self, features: int, epsilon: float, *, centred: bool, groups: int = 1) -> None:
        super().__init__()
        self.epsilon, self.groups = epsilon, groups
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features)) if centred else None
        self.register_buffer("sigma", torch.zeros(() if groups == 1 else groups))
        self.register_buffer("frozen", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(2, *self.sigma.shape), persistent=False)
        self.is_frozen = False
        self._seen: list[Tensor] = []  # mean deviation of each forward pass since the last step

    @property
    def deviation(self) -> Tensor:
        """The constant that would divide rows if the norm were frozen now, one per group; 1 before the first step."""
        return torch.where(self.sigma > 0, self.sigma, 1.0)

    @property
    def gain(self) -> Tensor:
        """The weight of each feature divided by `deviation`."""
        deviation = self.deviation
        return self.weight / (deviation if self.groups == 1 else deviation.repeat_interleave(self.group_size))

    @property
    def group_size(self) -> int:
        """Number of features of a group."""
        return len(self.weight) // self.groups

    @torch.no_grad()
    def follow(self) -> None:
        """Update sigma, unless frozen, with the deviations seen in the forward passes of a training step."""
        total, count = self.seen
        seen = torch.stack(self._seen).mean(dim=0) if self._seen else torch.where(count > 0, total / count, self.sigma)
        followed = torch.where(self.sigma > 0, self.sigma.lerp(seen, 1 - MEMORY), seen)
        self.sigma.copy_(torch.where(self.frozen > 0, self.sigma, followed))
        self.forget()

    @torch.no_grad()
    def forget(self) -> None:
        """Drop the deviations seen since the last step."""
        self._seen.clear()
        self.seen.zero_()

    @torch.no_grad()
    def set_frozen(self, frozen: bool = True) -> None:
        """Fix sigma at its present value or, with `frozen` False, let the norm normalise each row again."""
        self.is_frozen = frozen
        self.forget()
        self.frozen.fill_(float(frozen))

    def forward(self, source: Tensor) -> Tensor:
        """Normalise `source`, batch x T x features."""
        if torch.compiler.is_compiling():
            is_recorded = not torch.compiler.is_exporting()
        else:
            is_recorded = source.is_cuda and torch.cuda.is_current_stream_capturing()
        if is_recorded:  # compiled code, and a CUDA graph, must be valid before and after freezing
            return self._selected(source)
        if self.is_frozen:
            if self.bias is None:
                return source * self.gain
            return torch.addcmul(self.bias, source - source.mean(dim=-1, keepdim=True), self.gain)
        if self.training and torch.is_grad_enabled():
            self._observe(source.detach())
        if self.groups > 1:
            parts = functional.rms_norm(self._grouped(source), (self.group_size,), None, self.epsilon)
            return parts.flatten(-2) * self.weight
        if self.bias is None:
            return functional.rms_norm(source, self.weight.shape, self.weight, self.epsilon)
        return functional.layer_norm(source, self.weight.shape, self.weight, self.bias, self.epsilon)

    def _selected(self, source: Tensor) -> Tensor:
        source = source.float()
        parts = self._grouped(source if self.bias is None else source - source.mean(dim=-1, keepdim=True))
        squares = parts.square().mean(dim=-1)  # batch x T x groups
        if self.training and torch.is_grad_enabled():
            rows = squares.detach()[:, 1:] if source.shape[1] > 1 else squares.detach()
            deviations = rows.sqrt().mean(dim=(0, 1)).view_as(self.sigma)
            self.seen += torch.stack((deviations, torch.ones_like(deviations)))
        divisors = torch.where(self.frozen > 0, self.deviation, (squares + self.epsilon).sqrt())
        scaled = self.weight * (parts / divisors.unsqueeze(-1)).flatten(-2)
        return scaled if self.bias is None else scaled + self.bias

    @torch.no_grad()
    def _observe(self, source: Tensor) -> None:
        rows = (source[:, 1:] if source.shape[1] > 1 else source).float()
        if self.groups > 1:
            self._seen.append(self._grouped(rows).square().mean(dim=-1).sqrt().mean(dim=(0, 1)))
            return
        squares = rows.square().mean(dim=-1) if self.bias is None else rows.var(dim=-1, correction=0)
        self._seen.append(squares.sqrt().mean())

    def _grouped(self, source: Tensor) -> Tensor:
        return source.view(*source.shape[:-1], self.groups, self.group_size)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if f"{prefix}frozen" in state_dict:
            self.is_frozen = bool(state_dict[f"{prefix}frozen"])


def frozen_norms(model: nn.Module) -> dict[str, FrozenNorm]:
    """Return every `FrozenNorm` of a model, frozen already or not, by name, in order of execution."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenNorm)}


def follow_deviations(model: nn.Module) -> None:
    """Update sigma of each norm that is not frozen yet with the deviations seen in this step."""
    for norm in frozen_norms(model).values():
        if not norm.is_frozen:
            norm.follow()


def forget_seen(model: nn.Module) -> None:
    """Drop the deviations that the forward passes of a step have seen, before the step is repeated."""
    for norm in frozen_norms(model).values():
        norm.forget()


def freeze_due(model: nn.Module, settings: Freezing, *, step: int, num_steps: int) -> None:
    """Freeze the norms whose turn (`freezing_steps`) has come after `step` steps; frozen norms stay frozen."""
    norms = frozen_norms(model)
    for name, due in freezing_steps(list(norms), settings, num_steps).items():
        if step >= due and not norms[name].is_frozen:
            norms[name].set_frozen()


def freezing_steps(names: list[str], settings: Freezing, num_steps: int) -> dict[str, int]:
    """Return the step, 1 to num_steps, after which each norm is frozen: spread evenly over the shares of `settings`."""
    ordered = sorted(names, key=_turn)
    spread = settings.end_share - settings.start_share
    shares = [settings.start_share + spread * place / max(1, len(ordered) - 1) for place in range(len(ordered))]
    return {name: max(1, round(share * num_steps)) for name, share in zip(ordered, shares, strict=True)}


def _turn(name: str) -> tuple[int, int]:
    """Return the sort key of a norm: attention's by layer, then those of FFNs, then the final one.

    Of the orders tried, this one trained a proxy best; layer by layer, from either end, is as good within a percent.
    """
    if name == "final_norm":
        return 2, 0
    _, layer, part, *_ = name.split(".")
    return int(part in ("norm2", "ffn")), int(layer)
