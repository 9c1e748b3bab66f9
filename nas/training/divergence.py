"""When a run counts as diverged, and where in the model; docs/training.md has both rules.

A run diverges if a loss or gradient is not finite, or if each of its last `WINDOW` losses exceeds the initial loss:
then the model is worse than untrained, and not because of a single batch. The second rule counts losses after warm-up
or, with a distillation schedule, which may remove parts at once, in the second half of the steps.

On a GPU the host does not wait for the numbers of most steps, but judges them some steps later (`Readings`).
"""

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from nas.model.decoder import Decoder
from nas.model.norms import freezing_steps, frozen_norms
from nas.recipe.recipe import Recipe

MAX_LOSS = math.log(sys.float_info.max)  # nats; the perplexity of a larger loss overflows a float
WINDOW = 10  # steps; if a model learns nothing, all their losses exceed the first by chance once in a thousand
LAG = {"cpu": 0, "cuda": 4}  # steps that may be taken before the host reads the numbers of a step


def above_start(losses: Sequence[float], initial: float) -> bool:
    """Whether there are `WINDOW` training losses and each of the last `WINDOW` is above the initial loss."""
    return len(losses) >= WINDOW and min(losses[-WINDOW:]) > initial


def nonfinite_step(
    objective: nn.Module, batches: Iterable[Tensor], loss: float, gradient_norm: float
) -> tuple[str, str] | None:
    """Return why a step is not finite (a format string with `step` and `layer`) and the layer; None if all is finite.

    objective: the `Objective`, with the gradients of the step. batches: the step's tokens, each batch x T.
    """
    model = objective.get_submodule("model")
    if not math.isfinite(loss):
        return "non-finite loss at step {step}, first in {layer}", first_nonfinite_activation(model, batches)
    if math.isfinite(gradient_norm):
        return None
    names = [name for name, p in objective.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if names:
        layer = names[-1].removeprefix("model.").rpartition(".")[0]  # back-propagation reached the last one first
        return "non-finite gradient at step {step}, first in {layer}", layer
    return "gradient norm too large at step {step}, steepest in {layer}", steepest_module(model)


def first_nonfinite_activation(model: nn.Module, batches: Iterable[Tensor]) -> str:
    """Name the first module without submodules whose output is not finite, in order of execution, or "the model"."""
    broken: list[str] = []

    def check(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if not broken and isinstance(output, Tensor) and not output.isfinite().all():
            broken.append(name)

    modules = {name: module for name, module in model.named_modules() if not list(module.children())}
    handles = [module.register_forward_hook(partial(check, name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            for tokens in batches:
                model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return broken[0] if broken else "the model"


def steepest_module(model: nn.Module) -> str:
    """Name the module of the parameter whose gradient has the largest norm that is not NaN."""
    norms = {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.grad is not None}
    return max(norms, key=lambda name: (not math.isnan(norms[name]), norms[name])).rpartition(".")[0]


class Readings:
    """A queue of the numbers (loss, penalty, gradient norm) of steps that the host has not read yet.

    Without a lag, the numbers of a step are read before weights change. With a lag, the device applies the rules of
    `nas.training.divergence` itself: `halted` becomes 1 at the first step that breaks a rule and stays 1. Optimizers of
    torch that have it as their `found_inf` then change nothing. The host finds out when it reads that step.

    lag: number of steps that `take` leaves unread. losses, initial_loss: of earlier steps, as in `TrainingProgress`.
        least_initial: lower bound of the initial loss, nats per token.
    """

    def __init__(
        self, lag: int, device: str, losses: Sequence[float], initial_loss: float | None, least_initial: float
    ) -> None:
        self.lag, self._least_initial = lag, least_initial
        self.halted = torch.zeros((), device=device)
        known = [-math.inf] * (WINDOW - len(losses)) + list(losses)
        self._window = torch.tensor(known, dtype=torch.float64, device=device)
        initial = math.nan if initial_loss is None else initial_loss
        self._initial = torch.tensor(initial, dtype=torch.float64, device=device)
        self._settled = torch.zeros((), dtype=torch.bool, device=device)
        self._queue: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def begin(self, *, settled: bool) -> None:
        """Prepare the next step. settled: whether losses above the initial loss are divergence from this step on."""
        self._settled.fill_(settled)

    def judged(self, values: Tensor) -> Tensor:
        """Return a step's loss, penalty and gradient norm (`values`, float64) followed by `halted`.

        `halted` is 1 if this or an earlier step broke a rule of divergence, so that no weight changes; 0 without a lag.
        """
        if self.lag:
            loss, _, norm = values
            self._window.copy_(torch.cat((self._window[1:], loss[None])))
            self._initial.copy_(torch.where(self._initial.isnan(), loss.clamp(min=self._least_initial), self._initial))
            broken = ~(loss.isfinite() & norm.isfinite()) | self._settled & (self._window.min() > self._initial)
            self.halted.copy_(torch.maximum(self.halted, broken))
        return torch.cat((values, self.halted.to(values.dtype)[None]))

    def send(self, values: Tensor) -> None:
        """Queue a result of `judged`; from a GPU, it is copied to the host without waiting."""
        event = None
        if values.is_cuda:
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._queue.append((values, event))

    def take(self, *, everything: bool) -> Iterator[list[float]]:
        """Remove queued steps, oldest first, and yield the numbers of each: loss, penalty, gradient norm, `halted`.

        everything: whether to take all steps; otherwise the newest `lag` stay. Waits for numbers that are not here yet.
        """
        while len(self._queue) > (0 if everything else self.lag):
            values, event = self._queue.popleft()
            if event is not None:
                event.synchronize()
            yield values.tolist()


def turning_points(recipe: Recipe, model: Decoder) -> set[int]:
    """Return the steps to judge without lag: before a validation, a norm's freezing, gates of 0, or `keep_foldable`."""
    num_steps = recipe.scale.num_steps
    points = {*recipe.scale.rung_steps, *freezing_steps(list(frozen_norms(model)), recipe.freezing, num_steps).values()}
    if recipe.distillation is not None:
        points.add(math.ceil(recipe.distillation.end_share * num_steps))
    return points if recipe.foldable is None else points | set(range(0, num_steps + 1, recipe.foldable.every))
