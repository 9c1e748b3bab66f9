"""Takes the parts of its parent that a candidate lacks out of a model, gradually, by the number of the step alone."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from nas.model.decoder import Decoder
from nas.recipe.distillation import DistillationSchedule, PartKind, parent_architecture, removed_parts
from nas.training.distillation.parts import MODULES
from search_spaces.architecture import Architecture


class Gates:
    """The parts of a model that go. It begins as `initial_architecture` and ends as what is trained.

    A gate g multiplies what attention adds to the residual stream, and draws the stream behind an FFN towards what it
    would be without, s + g (f - s). At 0 the part leaves the model.
    """

    def __init__(self, model: Decoder, trained: Architecture, distillation: DistillationSchedule) -> None:
        self.model, self.trained, self.distillation = model, trained, distillation
        self.gate = 1.0
        self._parts = list(removed_parts(trained, parent_architecture(distillation, trained)))
        self._hooks = [
            getattr(model.layers[layer], kind).register_forward_hook(partial(self._gated, kind))
            for layer, kind in self._parts
        ]

    def move(self, *, step: int, num_steps: int) -> None:
        """Sets the gates as they are after step 0, 1, ..., num_steps; after the last the model is what is trained."""
        if self.gate > 0:
            self.gate = self.distillation.gate_at(step, num_steps)
            if self.gate == 0:
                for hook, (layer, kind) in zip(self._hooks, self._parts, strict=True):
                    hook.remove()
                    setattr(self.model.layers[layer], kind, None)
                    setattr(self.model.layers[layer], MODULES[kind][0], nn.Identity())
        if step == num_steps:
            self.model.architecture = self.trained

    def _gated(self, kind: PartKind, module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if kind == "attention":
            attended, entropy = output
            return self.gate * attended, entropy
        return inputs[-1].lerp(output, self.gate)  # the stream that an FFN adds to
