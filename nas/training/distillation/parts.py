"""Choice of the parts of a model that distillation trains, and gates of the parts that are gradually removed."""

import torch
from torch import nn

from nas.model.decoder import Decoder
from nas.model.layers import Block
from nas.recipe.distillation import DistillationSchedule, PartKind, parent_architecture, removed_parts, trained_parts
from search_spaces.architecture import Architecture

MODULES: dict[PartKind, tuple[str, str]] = {"attention": ("norm1", "attention"), "ffn": ("norm2", "ffn")}


def train_parts(model: Decoder, trained: Architecture, distillation: DistillationSchedule) -> None:
    """Let only the parameters that the schedule trains (`trainable`, `kept_layers`) require gradients.

    trained: the candidate's architecture at the end of training.
    """
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
    """Return the modules of a layer's sub-layer: its norm (an identity without one), then attention or FFN, if any."""
    return [module for name in MODULES[kind] if isinstance(module := getattr(layer, name), nn.Module)]


class Gates:
    """Gates of those attentions and FFNs of the parent that are gradually removed from a model.

    All gates have one value g, which depends on the step only. What attention adds to the residual stream is multiplied
    by g. An FFN that turns the stream s into f turns it into s + g (f - s) instead. At g = 0, the parts are removed.

    model: has the candidate's `initial_architecture`. trained: the architecture without these parts.
    as_tensor: whether g is a tensor, whose value compiled code reads again in every run.
    """

    def __init__(
        self, model: Decoder, trained: Architecture, distillation: DistillationSchedule, *, as_tensor: bool = False
    ) -> None:
        self.model, self.trained, self.distillation = model, trained, distillation
        blocks = [layer for layer in model.layers if isinstance(layer, Block)]
        removed = removed_parts(trained, parent_architecture(distillation, trained))
        self._parts = [(blocks[depth], kind) for depth, kind in removed]
        self._tensor = torch.ones((), device=model.embed.weight.device) if as_tensor else None
        self._set(1.0)

    def move(self, *, step: int, num_steps: int) -> bool:
        """Set the gates to their value after `step` steps, 0 to num_steps; return whether this call removed parts.

        If `step` is num_steps, also set the model's `architecture` to `trained`.
        """
        was_open = self.gate > 0
        if was_open:
            self._set(self.distillation.gate_at(step, num_steps))
            for block, kind in self._parts if self.gate == 0 else ():
                del block.gates[kind]
                setattr(block, kind, None)
                setattr(block, MODULES[kind][0], nn.Identity())
        if step == num_steps:
            self.model.architecture = self.trained
        return was_open and self.gate == 0 and bool(self._parts)

    def _set(self, gate: float) -> None:
        self.gate = gate
        for block, kind in self._parts:
            block.gates[kind] = gate if self._tensor is None else self._tensor.fill_(gate)
