"""The weights of a decoder in deployed form (named by nodes of its op graph) and in checkpoints; normalised linears.

The `weight` of a normalised linear is computed from other parameters at every use.
"""

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from costmodel.errors import UserError
from nas.model.decoder import Decoder
from nas.model.norms import frozen_norms
from nas.recipe.recipe import Normalisation, NormalisedLinears
from search_spaces.block import BLOCKS

WEIGHTS_FILE = "weights.safetensors"
FIRST_ITERATIONS = 15  # of the power method, as torch.nn.utils.parametrizations.spectral_norm has it
QK = {"attention.qkv": 2, "attention.q": 1, "attention.k": 1}
QKV = {"attention.qkv": 3, "attention.q": 1, "attention.k": 1, "attention.v": 1}
FFN = {"ffn.gate": 1, "ffn.up": 1, "ffn.down": 1, "ffn.fused": 1}
# Set -> linears of a block, and how many parts of each are normalised (`qkv` has three: queries, keys and values).
LINEARS: dict[NormalisedLinears, dict[str, int]] = {
    "qk": QK,
    "ffn": FFN,
    "qk+ffn": QK | FFN,
    "qkv+ffn": QKV | FFN,
    "qkvo+ffn": QKV | FFN | {"attention.out": 1},
}


def deployed_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return detached weights named `<node>.<suffix>`, in the form in which the op graph is executed ("deployed").

    They are the state dict's tensors, except for temperatures (t, where the state dict has ln t), the computed weights
    of normalised linears, and norms that are or will be frozen, whose gains are divided by their present deviation.
    """
    weights = {name: value.detach() for name, value in model.state_dict().items() if ".parametrizations." not in name}
    for name in [name for name in weights if name.endswith(".temperature.log_weight")]:
        weights[name.removesuffix("log_weight") + "weight"] = weights.pop(name).exp()
    with torch.no_grad():
        for name, module in model.named_modules():
            if is_parametrized(module, "weight"):
                weights[f"{name}.weight"] = module.weight.detach()
        for name, norm in frozen_norms(model).items():
            weights[f"{name}.weight"] = norm.gain
            del weights[f"{name}.sigma"], weights[f"{name}.frozen"]
    return weights


@torch.no_grad()
def load_deployed(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set weights from their deployed form, the inverse of `deployed_weights`; weights not given stay as they are.

    If the weight of a `FrozenNorm` is given, the norm is frozen, unless `<norm>.frozen` is given as 0: then the weight
    is the gain of a norm that still normalises each row. Raises UserError for a name or shape that is not the model's,
    or a weight that is not finite.
    """
    norms = frozen_norms(model)
    expected = deployed_weights(model) | {f"{name}.frozen": norm.frozen for name, norm in norms.items()}
    for name, value in weights.items():
        if name not in expected:
            raise UserError(f"weights must be those of the model, but it has no {name!r}.")
        if value.shape != expected[name].shape:
            raise UserError(
                f"weight {name!r} must have the shape {tuple(expected[name].shape)}, but has {tuple(value.shape)}."
            )
        if not value.isfinite().all():
            raise UserError(f"weights must be finite, but {name!r} holds NaN or infinity.")
        path, _, suffix = name.rpartition(".")
        module = model.get_submodule(path)
        if hasattr(module, "log_weight"):
            module.get_parameter("log_weight").copy_(value.log())
        elif is_parametrized(module, suffix):
            setattr(module, suffix, value.to(expected[name].dtype))
        else:
            getattr(module, suffix).copy_(value)
    for name, norm in norms.items():
        if f"{name}.weight" in weights:
            norm.sigma.zero_()
            norm.set_frozen(bool(weights.get(f"{name}.frozen", True)))


def stored_weights(model: Decoder) -> dict[str, Tensor]:
    """Return the state dict without repetitions: a tied or shared parameter is in it once, under its first name."""
    names = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
    return {name: value for name, value in model.state_dict().items() if name in names}


def load_stored(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Load weights that `stored_weights` returned. Raises UserError if names or shapes are not those of the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    aliases = {name: names[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
    state = {name: weights.get(aliases.get(name, name)) for name in model.state_dict()}
    missing = [name for name, value in state.items() if value is None]
    unknown = [name for name in weights if name not in state]
    if missing or unknown:
        raise UserError(f"weights must be those of the model, but {missing[:3]} are missing and {unknown[:3]} unknown.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"weights must have the model's shapes, but: {' '.join(str(error).split())}") from None


def normalise(model: Decoder, settings: Normalisation, generator: torch.Generator) -> None:
    """Let the `chosen_linears` compute their weights in normalised form. generator: draws initial singular vectors."""
    for linear, num_rows, num_matrices in chosen_linears(model, settings):
        form: nn.Module = _WeightNorm(num_rows)
        if settings.kind == "spectral":
            form = _SpectralNorm(linear.weight[:num_rows].detach(), num_matrices, generator)
        register_parametrization(linear, "weight", form)


def chosen_linears(model: Decoder, settings: Normalisation) -> list[tuple[nn.Linear, int, int]]:
    """Return each linear to normalise, how many of its first rows are normalised, and how many matrices these form.

    A linear that is not packed is one matrix. In a packed `attention.qkv` each matrix has as many rows as the keys, so
    that queries form several if their heads share key heads. Raises UserError for a shaped block, whose queries start
    at 0 and have no direction, or if no layer has such linears.
    """
    if model.architecture.block_facts.is_shaped:
        able = " or ".join(repr(name) for name, block in BLOCKS.items() if not block.is_shaped)
        raise UserError(
            f"normalisation of weights needs block {able}, but got {model.architecture.block!r}; leave it out."
        )
    chosen = list[tuple[nn.Linear, int, int]]()
    for layer in model.layers:
        modules = dict(layer.named_modules())
        for name, num_parts in LINEARS[settings.linears].items():
            if isinstance(linear := modules.get(name), nn.Linear):
                packed = name == "attention.qkv"
                widths = modules["attention"].widths[:num_parts] if packed else [linear.out_features]
                chosen.append((linear, sum(widths), sum(widths) // widths[-1]))
    if not chosen:
        raise UserError(f"normalisation of {settings.linears!r} has nothing to act on: no layer has such linears.")
    return chosen


class _WeightNorm(nn.Module):
    """Computes the first rows as `gain * direction / |direction|`, row by row; the others are unchanged.

    The initial value is the given weight. Source: Salimans and Kingma 2016, arXiv 1602.07868.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def forward(self, gain: Tensor, direction: Tensor) -> Tensor:
        rows = gain.unsqueeze(-1) * functional.normalize(direction[: self.num_rows], dim=-1)
        return torch.cat((rows, direction[self.num_rows :]))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight[: self.num_rows].norm(dim=-1), weight


class _SpectralNorm(nn.Module):
    """Divides each of the first matrices by its largest singular value; the rows after them are unchanged.

    The singular vectors follow the weights by one step of the power method in every forward pass with gradients, so
    that validation changes nothing. Source: Miyato et al. 2018, arXiv 1802.05957, section 2.1.
    """

    left: Tensor
    right: Tensor

    def __init__(self, rows: Tensor, num_matrices: int, generator: torch.Generator) -> None:
        """rows: the rows of all matrices, stacked."""
        super().__init__()
        self.num_rows = len(rows)
        matrices = rows.view(num_matrices, -1, rows.shape[-1])  # matrices x out x in
        right = torch.empty(num_matrices, matrices.shape[-1], 1, dtype=rows.dtype)
        self.register_buffer("right", functional.normalize(right.normal_(generator=generator), dim=1))
        self.register_buffer("left", functional.normalize(matrices @ self.right, dim=1))

    def forward(self, weight: Tensor) -> Tensor:
        matrices = self._matrices(weight)
        if self.training and torch.is_grad_enabled():
            self._follow(matrices.detach())
        left, right = self.left.clone(), self.right.clone()  # the next forward pass overwrites them
        largest = left.transpose(1, 2) @ matrices @ right  # matrices x 1 x 1
        return torch.cat(((matrices / largest).flatten(0, 1), weight[self.num_rows :]))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Compute the singular vectors of a newly assigned weight, and return the weight."""
        for _ in range(FIRST_ITERATIONS):
            self._follow(self._matrices(weight))
        return weight

    def _matrices(self, weight: Tensor) -> Tensor:
        return weight[: self.num_rows].view(len(self.left), -1, weight.shape[-1])

    @torch.no_grad()
    def _follow(self, matrices: Tensor) -> None:
        self.left.copy_(functional.normalize(matrices @ self.right, dim=1))
        self.right.copy_(functional.normalize(matrices.transpose(1, 2) @ self.left, dim=1))
