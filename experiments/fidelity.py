"""Does a cheap training rank architectures as the papers' did? Published rows, trained at variants of one scale.

A variant is a scale with changes: more tokens, another learning rate, a smaller vocabulary. Every training keeps its
checkpoints, so that a run that was killed goes on, and one that is finished is only printed again.
"""

import math
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from costmodel.config.schema import decode
from costmodel.config.units import format_seconds
from costmodel.errors import UserError
from experiments.ranking import correlation_table, perplexity_table, verdicts
from nas.corpus.corpus import prepare
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate, trial_id
from nas.recipe.recipe import SCALES, EntropyRegularisation, Recipe, Scale, ScaleName
from nas.storage import RUNS, locked
from nas.study.worker import worker_env
from nas.training.outcome import Outcome
from nas.training.trainer import train
from search_spaces.bases import base_architecture
from search_spaces.resolve import resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Changes to a scale, and the seeds to train with; None keeps the scale's own value.

    tokens_factor: training tokens over the scale's. batch: sequences per step, all in one forward pass.
    """

    seeds: tuple[int, ...]
    tokens_factor: float = 1.0
    seq_len: int | None = None
    vocab_size: int | None = None
    batch: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it.

    rows: published perplexity by notation, None where training diverged. variants: by the name of a column.

    Raises UserError for fewer than two rows or a variant without seeds.
    """

    scale: ScaleName
    base: str
    rows: dict[str, float | None]
    variants: dict[str, Variant]
    data: str = "stdlib"

    def __post_init__(self) -> None:
        if len(self.rows) < 2:
            raise UserError(f"`rows` must hold at least 2 rows to rank, but got {', '.join(self.rows) or 'none'}.")
        if empty := [name for name, variant in self.variants.items() if not variant.seeds] or not self.variants:
            raise UserError(f"`variants` must hold at least one, each with seeds, but got {empty=}.")


class Job(NamedTuple):
    """One training."""

    variant: str
    seed: int
    row: str


def run(name: str, data: dict[str, Any], console: Console) -> None:
    """Trains what is not trained yet, one thread on every core, then prints tables and verdicts.

    Raises UserError for bad settings or if another process is running the experiment.
    """
    settings = decode(Settings, data, f"experiment {name}")
    folder = RUNS / "experiments" / name / settings.scale
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        outcomes = _train_all(settings, folder, console)
    printed = {row: _perplexity(value) for row, value in settings.rows.items()}
    variants = {
        name: {
            seed: {row: _perplexity(outcomes[Job(name, seed, row)].perplexity) for row in settings.rows}
            for seed in variant.seeds
        }
        for name, variant in settings.variants.items()
    }
    console.print(perplexity_table(printed, variants))
    console.print(correlation_table(printed, variants))
    for line in verdicts(printed, variants):
        console.print(line)


def scale_of(settings: Settings, variant: Variant) -> Scale:
    """The scale with a variant's changes."""
    scale = SCALES[settings.scale]
    changes = {name: getattr(variant, name) for name in ("seq_len", "vocab_size", "batch", "learning_rate")}
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    if variant.batch is not None:
        given["micro_batch"] = variant.batch
    return replace(scale, tokens=round(scale.tokens * variant.tokens_factor), **given)


def training(settings: Settings, job: Job, folder: Path) -> Outcome:
    """One training in this process, with one thread, from where it was to its end."""
    torch.set_num_threads(1)
    keep_freed_memory()
    member = resolve(job.row, base_architecture(settings.base))
    recipe = Recipe(
        scale=scale_of(settings, settings.variants[job.variant]),
        data=settings.data,
        entropy=EntropyRegularisation() if member.entropy_regularised else None,
    )
    candidate = Candidate(architecture=member.architecture, recipe=recipe)
    corpus = prepare(settings.data, vocab_size=candidate.trained.vocab_size)
    *_, outcome = train(candidate, corpus, seed=job.seed, folder=folder / trial_id(candidate, seed=job.seed))
    assert isinstance(outcome, Outcome)
    return outcome


def _train_all(settings: Settings, folder: Path, console: Console) -> dict[Job, Outcome]:
    """Trains in the order of the YAML, as many at a time as this process may use cores; tells each one's result."""
    jobs = [
        Job(name, seed, row)
        for name, variant in settings.variants.items()
        for seed in variant.seeds
        for row in settings.rows
    ]
    os.environ.update(worker_env(threads=1))
    for vocab_size in {scale_of(settings, variant).vocab_size for variant in settings.variants.values()}:
        # once, before the processes want it
        prepare(settings.data, vocab_size=vocab_size or base_architecture(settings.base).vocab_size)
    outcomes: dict[Job, Outcome] = {}
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(max_workers=workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(training, settings, job, folder): job for job in jobs}
        for future in as_completed(futures):
            job = futures[future]
            outcomes[job] = future.result()
            left_s = _seconds_left(settings, jobs, outcomes) / workers
            console.print(
                f"{job.variant} seed {job.seed} {job.row}: {_describe(outcomes[job])}; "
                f"{len(outcomes)} of {len(jobs)}, about {format_seconds(left_s)} left"
            )
    return outcomes


def _seconds_left(settings: Settings, jobs: Sequence[Job], outcomes: Mapping[Job, Outcome]) -> float:
    """Seconds left of one core, at the mean seconds a token of what is finished."""
    done = outcomes.values()
    rate = sum(outcome.seconds for outcome in done) / sum(outcome.tokens for outcome in done)
    return rate * sum(scale_of(settings, settings.variants[job.variant]).tokens for job in jobs if job not in outcomes)


def _perplexity(value: float | None) -> float:
    """None, a divergence, is infinite."""
    return math.inf if value is None else value


def _describe(outcome: Outcome) -> str:
    end = f"diverged, {outcome.reason}" if outcome.perplexity is None else f"perplexity {outcome.perplexity:.2f}"
    return f"{end} in {format_seconds(outcome.seconds)}"
