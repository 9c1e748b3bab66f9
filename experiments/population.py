"""Candidates an hour: a population trained as one program against the same candidates one after the other.

Candidates are drawn from a search space, as a search would mix them. In every round each group is trained both ways,
validation included, in one process and on as many threads; the way that goes first alternates. CPU seconds are told
beside wall seconds, since they do not grow with what else the machine does.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from costmodel.config.schema import decode
from costmodel.errors import UserError
from experiments.batched_training import train_population
from nas.corpus.corpus import Corpus, prepare
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES, EntropyRegularisation, Recipe, Scale, ScaleName
from nas.study.worker import worker_env
from nas.training.trainer import train
from search_spaces.space import load_space, sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it.

    tokens: of each training. sizes: members of the groups. required_ratio: of the candidates an hour, together over
    alone.

    Raises UserError if there is no group or no round.
    """

    space: str
    scale: ScaleName
    tokens: int
    sizes: tuple[int, ...]
    rounds: int
    threads: int
    seed: int
    required_ratio: float
    data: str = "stdlib"

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or self.rounds < 1:
            raise UserError(f"`sizes` and `rounds` must be at least 1, but got {self.sizes=}, {self.rounds=}.")

    @property
    def short(self) -> Scale:
        """The scale with fewer tokens, to train and in proportion to validate on."""
        scale = SCALES[self.scale]
        validation_tokens = max(scale.seq_len, scale.validation_tokens * self.tokens // scale.tokens)
        return replace(scale, tokens=self.tokens, validation_tokens=validation_tokens)


class Seconds(NamedTuple):
    """What one training of a whole group took."""

    wall_s: float
    cpu_s: float


Trainings = dict[tuple[int, str], list[Seconds]]  # by size and way, one for every round


def run(name: str, data: dict[str, Any], console: Console) -> None:
    """Trains every group both ways in a process of its own, then prints a line per size and the verdict."""
    settings = decode(Settings, data, f"experiment {name}")
    os.environ.update(worker_env(threads=settings.threads))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        trainings = pool.submit(measure, settings).result()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    console.print(table(settings, trainings, device))
    console.print(verdict(settings, trainings, device))


def measure(settings: Settings) -> Trainings:
    """Seconds of every size, way and round."""
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    candidates = draw(settings)
    corpus = prepare(settings.data, vocab_size=candidates[0].trained.vocab_size)
    trainings: Trainings = {(size, way): [] for size in settings.sizes for way in WAYS}
    for train_all in WAYS.values():  # once untimed, which loads kernels and caches
        train_all(candidates[:1], corpus, settings.seed, device)
    for index in range(settings.rounds):
        for size in settings.sizes:
            for way in sorted(WAYS, reverse=index % 2 == 1):
                work = partial(WAYS[way], candidates[:size], corpus, settings.seed, device)
                trainings[size, way].append(timed(work))
    return trainings


def draw(settings: Settings) -> list[Candidate]:
    """Draws as many different members of the space as the largest group has."""
    rng, space = np.random.default_rng(settings.seed), load_space(settings.space)
    recipe = Recipe(scale=settings.short, data=settings.data)
    return [
        Candidate(
            architecture=member.architecture,
            recipe=replace(recipe, entropy=EntropyRegularisation() if member.entropy_regularised else None),
        )
        for member in (sample(space, rng) for _ in range(max(settings.sizes)))
    ]


def train_alone(candidates: Sequence[Candidate], corpus: Corpus, seed: int, device: str) -> None:
    """One after the other."""
    for candidate in candidates:
        for _ in train(candidate, corpus, seed=seed, device=device):
            pass


def train_together(candidates: Sequence[Candidate], corpus: Corpus, seed: int, device: str) -> None:
    """Trains as one program."""
    for _ in train_population(candidates, corpus, seed=seed, device=device):
        pass


WAYS = {"alone": train_alone, "together": train_together}


def timed(work: Callable[[], None]) -> Seconds:
    """What a call takes; trainings end with a number read from the device, so that nothing is left running."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def ratio(trainings: Trainings, size: int, clock: str) -> float:
    """Median seconds alone over median seconds together."""
    alone, together = (statistics.median(getattr(one, clock) for one in trainings[size, way]) for way in WAYS)
    return float(alone / together)


def table(settings: Settings, trainings: Trainings, device: str) -> Table:
    """A row per size: candidates an hour both ways, and the ratios by wall and by CPU seconds."""
    title = f"candidates an hour, {SCALES[settings.scale].tokens:,} tokens each, {device}, {settings.threads} thread(s)"
    result = Table(title=title)
    for column in ("members", "one at a time", "together", "ratio", "ratio by CPU seconds"):
        result.add_column(column, justify="right")
    share = settings.tokens / SCALES[settings.scale].tokens
    for size in settings.sizes:
        rates = [3600 * size * share / statistics.median(one.wall_s for one in trainings[size, way]) for way in WAYS]
        ratios = [ratio(trainings, size, clock) for clock in ("wall_s", "cpu_s")]
        result.add_row(str(size), *(f"{rate:.1f}" for rate in rates), *(f"{one:.2f}" for one in ratios))
    return result


def verdict(settings: Settings, trainings: Trainings, device: str) -> str:
    """Whether a search on this device should train groups."""
    best = max(settings.sizes, key=lambda size: ratio(trainings, size, "wall_s"))
    reached = ratio(trainings, best, "wall_s")
    decision = "train groups" if reached >= settings.required_ratio else "train one at a time"
    return f"On {device}: {decision} (best {reached:.2f} with {best}, required {settings.required_ratio:.2f})."
