"""The parts of a model that a distillation schedule trains; the others stay the parent's."""

from torch import nn

from nas.model.decoder import Decoder
from nas.recipe.distillation import DistillationSchedule, PartKind, parent_architecture, trained_parts
from search_spaces.architecture import Architecture

MODULES: dict[PartKind, tuple[str, str]] = {"attention": ("norm1", "attention"), "ffn": ("norm2", "ffn")}


def train_parts(model: Decoder, trained: Architecture, distillation: DistillationSchedule) -> None:
    """Let only the parameters that the schedule trains require gradients, unless it trains all."""
    parent = parent_architecture(distillation, trained)
    parts = trained_parts(trained, parent, distillation.trainable)
    if parts is not None:
        model.requires_grad_(False)
        model.final_norm.requires_grad_(trained.final_norm != parent.final_norm)
        for part in parts:
            for module in modules_of(model.layers[part.layer], part.kind):
                module.requires_grad_()
    if distillation.kept_layers is not None:
        for kept in (model.embed, model.position, *model.layers[: distillation.kept_layers]):
            if kept is not None:
                kept.requires_grad_(False)


def modules_of(layer: nn.Module, kind: PartKind) -> list[nn.Module]:
    """Return the norm and the attention or FFN of a layer, if it has them."""
    return [module for name in MODULES[kind] if isinstance(module := getattr(layer, name), nn.Module)]
