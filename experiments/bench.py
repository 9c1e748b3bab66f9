"""Measures how fast this machine trains and prices: our training step against plain PyTorch, and the default space.

The ways of training alternate every few seconds in one process, so that other work on the machine affects them equally.
A ratio is the median over rounds of two rates in the same round.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

from costmodel.errors import UserError
from experiments.bars import cpu_s, median_ratio, table
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate
from nas.recipe.papers import recipe_for
from nas.recipe.recipe import ScaleName
from nas.run.config import StudyConfig
from nas.study.priced_study import price_study
from nas.training.objective import Objective
from nas.training.optimizer import adamw
from search_spaces.bases import base_architecture
from search_spaces.resolve import resolve

PLAIN, OURS, REGULARISED = "plain loop", "ours", "ours, entropy regularised"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML; `threads` are torch's, `burst_s` is the length of a turn in seconds.

    A UserError is raised for a number that is not positive.
    """

    architecture: str
    base: str
    scale: ScaleName
    threads: int
    rounds: int
    burst_s: float
    protocols: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("threads", "rounds", "burst_s"):
            if (value := getattr(self, name)) <= 0:
                raise UserError(f"`{name}` must be positive, but got {value}.")


def run(name: str, settings: Settings, console: Console) -> None:
    """Print the rate of each way of training, then the processor seconds of pricing the default space."""
    rates = training_rates(settings)
    rows = [
        (way, f"{statistics.median(rates[way]):,.0f}", f"{median_ratio(rates[way], rates[PLAIN]):.2f}") for way in rates
    ]
    console.print(table(("way", "tokens/s", "over the plain loop"), rows, title=f"training {settings.architecture}"))
    priced = []
    for protocol in settings.protocols:
        config = StudyConfig(budget_latency="5min", protocol=protocol)
        priced.append((protocol, f"{cpu_s(lambda config=config: price_study(config)):.2f}"))  # type: ignore[misc]
    console.print(table(("protocol", "s of CPU"), priced, title="pricing the default space"))


def training_rates(settings: Settings) -> dict[str, list[float]]:
    """Return tokens per second of every way of training, one figure per round."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    steps = {way: stepper(settings, way) for way in (PLAIN, OURS, REGULARISED)}
    rates: dict[str, list[float]] = {way: [] for way in steps}
    try:
        for step, _ in steps.values():
            step()
        for _ in range(settings.rounds):
            for way, (step, tokens) in steps.items():
                count, since_s = 0, time.perf_counter()
                while (elapsed_s := time.perf_counter() - since_s) < settings.burst_s:
                    step()
                    count += 1
                rates[way].append(count * tokens / elapsed_s)
    finally:
        torch.set_num_threads(before)
    return rates


def stepper(settings: Settings, way: str) -> tuple[Callable[[], float], int]:
    """Return a function that takes a training step on random tokens and returns the loss, and the tokens of a step."""
    recipe = recipe_for(settings.scale, "stdlib", entropy_regularised=way == REGULARISED)
    architecture = resolve(settings.architecture, base_architecture(settings.base)).architecture
    candidate = Candidate(architecture=architecture, recipe=replace(recipe, distillation=None))
    generator = torch.Generator().manual_seed(0)
    objective, scale = Objective(candidate, generator), recipe.scale
    inputs, targets = torch.randint(candidate.trained.vocab_size, (2, scale.batch, scale.seq_len), generator=generator)
    parameters = list(objective.parameters())
    optimizer = torch.optim.AdamW(parameters) if way == PLAIN else adamw(objective, recipe)

    def step() -> float:
        if way == PLAIN:
            logits = objective.model(inputs, with_entropies=False).logits  # batch x T x vocab
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            torch.autograd.backward(loss)
        else:
            loss = objective.backward(inputs, targets, num_parts=1, penalty_weight=1.0).cross_entropy
        nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, scale.batch * scale.seq_len
