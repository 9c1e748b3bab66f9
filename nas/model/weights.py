"""The weights of a decoder by node of its op graph: as its executors read them, and as a checkpoint stores them."""

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from costmodel.errors import UserError
from nas.model.decoder import Decoder
from nas.model.norms import frozen_norms

WEIGHTS_FILE = "weights.safetensors"


def deployed_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return detached weights by `<node>.<suffix>`, as executors of the op graph read them.

    They are the state dict's tensors, except for temperatures (t, where the state dict has ln t), normalised weights,
    which are computed, and norms that are frozen or will be, whose gains include their present deviation.
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

    A norm that will be frozen is frozen now if its weight is given, unless `<norm>.frozen` is given as 0: the weight is
    then the gain of a norm that normalises each row. Raises UserError for a name or shape that is not the model's, or a
    weight that is not finite.
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
    """Return the state dict as files have it: a tied or shared parameter is there once, under one of its names."""
    names = {name for name, _ in chain(model.named_parameters(), model.named_buffers())}
    return {name: value for name, value in model.state_dict().items() if name in names}


def load_stored(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Load weights that `stored_weights` returned. Raises UserError for a name or shape that is not the model's."""
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
