"""Gradually removes the parts of a parent that a candidate lacks; the gates depend on the step only."""

import torch
from torch import nn

from nas.model.decoder import Block, Decoder
from nas.recipe.distillation import DistillationSchedule, parent_architecture, removed_parts
from nas.training.distillation.parts import MODULES
from search_spaces.architecture import Architecture


class Gates:
    """Gates of the parts that are removed from a model, which starts as `initial_architecture` and ends as `trained`.

    A gate g multiplies what attention adds to the residual stream. With s and f the stream before and after an FFN, it
    replaces f by s + g (f - s). At 0 the part leaves the model.
    as_tensor: whether the gate is a tensor, which may change in compiled code.
    """

    def __init__(
        self, model: Decoder, trained: Architecture, distillation: DistillationSchedule, *, as_tensor: bool = False
    ) -> None:
        self.model, self.trained, self.distillation = model, trained, distillation
        blocks = [layer for layer in model.layers if isinstance(layer, Block)]
        self._parts = [
            (blocks[depth], kind) for depth, kind in removed_parts(trained, parent_architecture(distillation, trained))
        ]
        self._tensor = torch.ones((), device=model.embed.weight.device) if as_tensor else None
        self._set(1.0)

    def move(self, *, step: int, num_steps: int) -> bool:
        """Set the gates for step 0, 1, ..., num_steps; after the last, the model has the trained architecture.

        Returns whether parts left the model.
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
