"""One optimizer step of a model: the gradients of a batch, and the update of the weights."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from nas.model.norms import followed_deviations, forget_seen
from nas.recipe.recipe import Recipe
from nas.training.distillation.teacher import Lesson
from nas.training.memory import MicroBatch
from nas.training.objective import Losses, Objective
from nas.training.optimizer import optimizers, set_rate
from nas.training.readings import Readings


class OptimizerStep:
    """An optimizer step that reads no number back, so that it can be captured as a graph on a GPU.

    lessons: maps a batch and its number of parts to the parent's lessons for each part; None without a parent.
    readings: judge each step's numbers before they are sent to the host.
    """

    readings: Readings

    def __init__(
        self,
        objective: Objective,
        recipe: Recipe,
        device: str,
        lessons: Callable[[Tensor, int], Iterable[Lesson] | None],
    ) -> None:
        self.objective, self.lessons = objective, lessons
        self.optimizers = optimizers(objective, recipe)
        self._clip_norm = recipe.clip_norm
        self._micro_batch = MicroBatch(recipe.scale.micro_batch, objective)
        self._penalty_weight = torch.zeros((), device=device)

    def begin(self, *, rate: float, penalty_weight: float, settled: bool) -> None:
        """Set rate and penalty weight of the next step. settled: whether a loss above the start is divergence."""
        set_rate(self.optimizers, rate)
        self._penalty_weight.fill_(penalty_weight)
        self.readings.begin(settled=settled)

    def differentiate(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients; return the step's numbers for the host, and the norm of the whole gradient."""

        def backward(parts: int) -> Losses:
            lessons, weight = self.lessons(inputs, parts), self._penalty_weight
            return self.objective.backward(inputs, targets, num_parts=parts, penalty_weight=weight, lessons=lessons)

        losses = self._micro_batch.in_parts(backward, len(inputs))
        gradients = [value.grad for value in self.objective.parameters() if value.grad is not None]
        followed_deviations(self.objective.model)
        norm = nn.utils.get_total_norm(gradients)
        numbers = torch.stack((losses.cross_entropy, losses.penalty, norm.double()))
        return self.readings.judged(numbers), norm

    def move(self, norm: Tensor) -> None:
        """Clip the gradients and update the weights. norm: of the whole gradient."""
        nn.utils.clip_grads_with_norm_(list(self.objective.parameters()), self._clip_norm, norm)
        for optimizer in self.optimizers:
            optimizer.step()

    def clear(self) -> None:
        """Drop the gradients, also of gated parts, which do not change without one."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def take(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Take the whole step; return its numbers."""
        values, norm = self.differentiate(inputs, targets)
        self.move(norm)
        self.clear()
        return values

    def undo(self) -> None:
        """Drop the gradients and norm statistics of a partly captured step; change no weights."""
        self.clear()
        forget_seen(self.objective.model)
