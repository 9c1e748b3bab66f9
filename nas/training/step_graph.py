"""A training step, and its capture as a CUDA graph; without a graph, small batches wait for launches of kernels."""

import logging
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from nas.model.norms import follow_deviations, forget_seen
from nas.recipe.recipe import Recipe
from nas.training.distillation.teacher import Lesson
from nas.training.divergence import Readings
from nas.training.memory import available_bytes
from nas.training.objective import Losses, Objective
from nas.training.optimizer import optimizers

MOST_CAPTURED = {"cuda": 1 << 16}  # tokens of a step by type of device; larger ones keep a GPU busy without a graph
CLIP_EPSILON = 1e-6  # torch adds it to the norm when it clips gradients
WARM_UP = 3  # steps before the capture, in which code is compiled and optimizers make their state

logger = logging.getLogger(__name__)


class OptimizerStep:
    """An optimizer step that sends no number to the host, so that it can be captured as a graph on a GPU.

    lessons: maps a batch and its number of parts to the parent's lesson for each part, or to None without a parent.
    readings: its `judged` checks the numbers of each step on the device; must be set before the first step.
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
        self._micro_batch, self._is_halved = recipe.scale.micro_batch, False
        self._penalty_weight = torch.zeros((), device=device)

    def begin(self, *, rate: float, penalty_weight: float, settled: bool) -> None:
        """Set the next step's learning rate and weight of the entropy penalty. settled: for `Readings.begin`."""
        for group in chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._penalty_weight.fill_(penalty_weight)
        self.readings.begin(settled=settled)

    def differentiate(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients; return the result of `Readings.judged`, and the norm of the whole gradient.

        inputs, targets: batch x T. If the memory of a GPU runs out, the micro-batch is halved for this and later steps.
        Raises torch.OutOfMemoryError the second time, or if it cannot be halved.
        """

        def backward() -> Losses:
            parts = max(1, len(inputs) // self._micro_batch)
            lessons, weight = self.lessons(inputs, parts), self._penalty_weight
            return self.objective.backward(inputs, targets, num_parts=parts, penalty_weight=weight, lessons=lessons)

        losses: Losses | None = None
        try:
            losses = backward()
        except torch.OutOfMemoryError:
            size = min(self._micro_batch, len(inputs))
            half = size // 2
            if self._is_halved or not half or len(inputs) % half:
                raise
            logger.warning(
                f"out of memory with {size} sequences in a forward pass; training continues with {half}, which "
                f"changes only the rounding of its numbers"
            )
            self._micro_batch, self._is_halved = half, True
        if losses is None:  # after the handler, whose traceback keeps the tensors of the pass that failed
            self.undo()
            torch.cuda.empty_cache()
            losses = backward()
        gradients = [value.grad for value in self.objective.parameters() if value.grad is not None]
        follow_deviations(self.objective.model)
        norm = nn.utils.get_total_norm(gradients)
        numbers = torch.stack((losses.cross_entropy, losses.penalty, norm.double()))
        return self.readings.judged(numbers), norm

    def move(self, norm: Tensor) -> None:
        """Clip the gradients and update the weights. norm: norm of the whole gradient."""
        if norm.is_cuda or not norm + CLIP_EPSILON <= self._clip_norm:  # else the factor is 1; saves a pass on a CPU
            nn.utils.clip_grads_with_norm_(list(self.objective.parameters()), self._clip_norm, norm)
        for optimizer in self.optimizers:
            optimizer.step()

    def clear(self) -> None:
        """Drop the gradients. Optimizers do not change a weight without gradient, such as that of a removed part."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def take(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Call `differentiate`, `move` and `clear`; return the result of `Readings.judged`."""
        values, norm = self.differentiate(inputs, targets)
        self.move(norm)
        self.clear()
        return values

    def undo(self) -> None:
        """Drop the gradients of a step that was only partly taken, and what each `FrozenNorm` recorded in it."""
        self.clear()
        forget_seen(self.objective.model)


class StepGraph:
    """Launches the work of a step as a CUDA graph after `WARM_UP` steps.

    The work must not wait for numbers of the GPU, and whatever changes between steps must stay in the same tensors. The
    graph holds its memory until it is dropped. There is no graph (`is_wanted` is False) for a step of more than
    MOST_CAPTURED tokens, on a CPU, if the recipe's `compile` is off, or after a capture failed.

    work: takes a step on inputs and targets, both batch x T, and returns its numbers.
    undo: clears what a failed capture leaves.
    """

    def __init__(
        self, work: Callable[[Tensor, Tensor], Tensor], undo: Callable[[], None], recipe: Recipe, device: str
    ) -> None:
        self._work, self._undo, self._device, scale = work, undo, device, recipe.scale
        most = MOST_CAPTURED.get(torch.device(device).type, 0)
        self.is_wanted = recipe.compile == "auto" and scale.batch * scale.seq_len <= most
        self.drop()

    def drop(self, *, for_good: bool = False) -> None:
        """Drop the graph; call this if the work changes. Unless `for_good`, another is captured after WARM_UP steps."""
        self.is_wanted = self.is_wanted and not for_good
        self._num_taken, self._num_bytes = 0, 0
        self._replay: Callable[..., Tensor] | None = None

    def make_room(self) -> None:
        """Drop the graph if less memory is free than the graph holds, so that a step without it fits."""
        if self._replay and (available_bytes(self._device) or 0) < self._num_bytes:
            self.drop()

    def take(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Take a step with the graph, which is captured first if due, and return the step's numbers.

        While there is no graph, take no step, and return None.
        """
        if self._replay is None and self.is_wanted:
            self._num_taken += 1
            if self._num_taken > WARM_UP:
                torch.cuda.empty_cache()  # before the capture, so that only the graph's memory is counted
                before = torch.cuda.memory_reserved()
                try:
                    self._replay = captured(self._work, inputs, targets)
                except RuntimeError as error:  # such as out of memory
                    self.is_wanted = False
                    reason = str(error).strip().partition("\n")[0]
                    logger.warning("steps cannot be captured as a graph, so that they take longer: %s", reason)
                self._num_bytes = torch.cuda.memory_reserved() - before
                if not self.is_wanted:  # after the handler, whose traceback keeps tensors of the capture
                    self._undo()
        return self._replay(inputs, targets) if self._replay else None


def captured(work: Callable[[Tensor, Tensor], Tensor], *arguments: Tensor) -> Callable[..., Tensor]:
    """Capture the work without running it; return a function that runs it on other arguments of the same shapes.

    Every run returns the same tensor, whose values the next run overwrites.
    """
    held = [argument.clone() for argument in arguments]
    graph = torch.cuda.CUDAGraph()
    # other threads, which prepare the next batches, may continue their CUDA calls
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work(*held)

    def replay(*others: Tensor) -> Tensor:
        for mine, other in zip(held, others, strict=True):
            mine.copy_(other, non_blocking=True)
        graph.replay()
        return result

    return replay
