"""Does a cheap training rank architectures as a long one does, and as the papers' did?

A variant is the recipe of a scale with changes: more tokens, another optimizer, a trained parent. Every training keeps
its checkpoints, so that a run that was killed goes on. What was trained is written to `outcomes.csv` beside them; what
took hours is committed in `experiments/data`, and is read from there as long as recipe and corpus are the same.
"""

import csv
import io
import math
import multiprocessing
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from costmodel.config.schema import decode
from costmodel.config.units import format_seconds
from costmodel.errors import UserError
from experiments.ranking import correlation_table, perplexity_table, verdicts
from nas.conversion.parent import Parent, load_parent
from nas.corpus.corpus import Corpus, prepare
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate, candidate_id, trial_id
from nas.recipe.overrides import RecipeChanges, changed
from nas.recipe.papers import recipe_for
from nas.recipe.recipe import Recipe, ScaleName, from_parent
from nas.storage import RUNS, locked, replace_file
from nas.study.parent import teacher_of
from nas.study.worker import worker_env
from nas.training.outcome import Outcome
from nas.training.trainer import train
from search_spaces.bases import base_architecture
from search_spaces.resolve import resolve

DATA = Path(__file__).parent / "data"
OUTCOMES_FILE = "outcomes.csv"
DIVERGED = "diverged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What changes the recipe of a scale, and the seeds to train with; None keeps the recipe's own value.

    parent: what candidates start from, `builtin` or a folder; the changes are then to the recipe from a parent.
    recipe: as `nas.train --recipe.*`; of a batch all sequences are in one forward pass.
    """

    seeds: tuple[int, ...]
    parent: str | None = None
    tokens: int | None = None
    seq_len: int | None = None
    recipe: RecipeChanges = field(default_factory=RecipeChanges)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it.

    rows: published perplexity by notation; `diverged` where it did, None where no paper has the row.
    variants: by the name of a column; the others are compared with the first.
    committed: file of outcomes in `experiments/data`.

    Raises UserError for fewer than two rows or a variant without seeds.
    """

    scale: ScaleName
    base: str
    rows: dict[str, float | str | None]
    variants: dict[str, Variant]
    data: str = "stdlib"
    committed: str | None = None

    def __post_init__(self) -> None:
        if len(self.rows) < 2:
            raise UserError(f"`rows` must hold at least 2 rows to rank, but got {', '.join(self.rows) or 'none'}.")
        if odd := [row for row, value in self.rows.items() if isinstance(value, str) and value != DIVERGED]:
            raise UserError(f"`rows` must hold perplexities, `{DIVERGED}` or nothing, but not so {', '.join(odd)}.")
        if empty := [name for name, variant in self.variants.items() if not variant.seeds] or not self.variants:
            raise UserError(f"`variants` must hold at least one, each with seeds, but got {empty=}.")

    @property
    def published(self) -> dict[str, float]:
        """Printed perplexities of the rows that a paper has; a divergence is infinite."""
        return {
            row: math.inf if isinstance(value, str) else value for row, value in self.rows.items() if value is not None
        }


class Job(NamedTuple):
    """One training."""

    variant: str
    seed: int
    row: str


class Key(NamedTuple):
    """What the result of a training depends on."""

    candidate_id: str
    corpus: str
    seed: int


class Ended(NamedTuple):
    """How a training ended. perplexity: None if it diverged."""

    perplexity: float | None
    tokens: int
    seconds: float
    reason: str


def run(name: str, data: dict[str, Any], console: Console) -> None:
    """Trains what is not trained yet, one thread on every core, then prints tables and verdicts.

    Raises UserError for bad settings or if another process is running the experiment.
    """
    settings = decode(Settings, data, f"experiment {name}")
    folder = RUNS / "experiments" / name / settings.scale
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        ended = _train_all(settings, folder, console)
    variants = {
        name: {
            seed: {row: _perplexity(ended[Job(name, seed, row)].perplexity) for row in settings.rows}
            for seed in variant.seeds
        }
        for name, variant in settings.variants.items()
    }
    seconds = {
        name: statistics.fmean(one.seconds for job, one in ended.items() if job.variant == name) for name in variants
    }
    console.print(perplexity_table(settings.published, variants))
    console.print(correlation_table(settings.published, variants, seconds))
    for line in verdicts(settings.published, variants):
        console.print(line)


def recipe_of(settings: Settings, variant: Variant, parent: Parent | None, *, entropy_regularised: bool) -> Recipe:
    """The recipe of the scale with a variant's changes."""
    recipe = recipe_for(settings.scale, settings.data, entropy_regularised=entropy_regularised)
    recipe = recipe if parent is None else from_parent(recipe, parent.route)
    scale, given = recipe.scale, variant.recipe
    scale = replace(scale, tokens=variant.tokens or scale.tokens, seq_len=variant.seq_len or scale.seq_len)
    if given.scale.batch is not None:
        given = replace(given, scale=replace(given.scale, micro_batch=given.scale.batch))
    return changed(replace(recipe, scale=scale), given)


def candidate_of(settings: Settings, job: Job, parent: Parent | None) -> Candidate:
    """What a job trains."""
    member = resolve(job.row, base_architecture(settings.base))
    variant = settings.variants[job.variant]
    recipe = recipe_of(settings, variant, parent, entropy_regularised=member.entropy_regularised)
    return Candidate(architecture=member.architecture, recipe=recipe)


def training(settings: Settings, job: Job, folder: Path) -> Ended:
    """One training in this process, with one thread, from where it was to its end."""
    torch.set_num_threads(1)
    keep_freed_memory()
    parent = _parent(settings.variants[job.variant])
    candidate = candidate_of(settings, job, parent)
    corpus = _corpus(settings, candidate.recipe, parent)
    more: dict[str, Any] = {}
    if parent is not None:
        teacher = teacher_of(parent, corpus, candidate.recipe.scale, "cpu")
        more = {"initial": parent.start(candidate), "teacher": teacher}
    place = folder / trial_id(candidate, seed=job.seed)
    *_, outcome = train(candidate, corpus, seed=job.seed, folder=place, **more)
    assert isinstance(outcome, Outcome)
    return Ended(outcome.perplexity, outcome.tokens, outcome.seconds, outcome.reason or "")


def _parent(variant: Variant) -> Parent | None:
    return None if variant.parent is None else load_parent(variant.parent)


def _corpus(settings: Settings, recipe: Recipe, parent: Parent | None) -> Corpus:
    vocab_size = recipe.scale.vocab_size or base_architecture(settings.base).vocab_size
    return prepare(settings.data, vocab_size=vocab_size, tokenizer=parent and parent.model.tokenizer)


def _train_all(settings: Settings, folder: Path, console: Console) -> dict[Job, Ended]:
    """Trains in the order of the YAML, as many at a time as this process may use cores; tells each one's result."""
    jobs = list(_jobs(settings))
    os.environ.update(worker_env(threads=1))
    keys = _keys(settings, jobs)  # prepares the corpora, once, before the processes want them
    known = _read(DATA / settings.committed) if settings.committed else {}
    ended = {job: known[key] for job, key in keys.items() if key in known}
    for job in ended:
        console.print(f"{job.variant} seed {job.seed} {job.row}: {_describe(ended[job])}, committed")
    workers, own = len(os.sched_getaffinity(0)), dict[Job, Ended]()
    with ProcessPoolExecutor(max_workers=workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(training, settings, job, folder): job for job in jobs if job not in ended}
        for future in as_completed(futures):
            job = futures[future]
            own[job] = future.result()
            left_s = _seconds_left(settings, [one for one in futures.values() if one not in own], own) / workers
            console.print(
                f"{job.variant} seed {job.seed} {job.row}: {_describe(own[job])}; {len(ended) + len(own)} of "
                f"{len(jobs)}, about {format_seconds(left_s)} left"
            )
            _write(folder / OUTCOMES_FILE, ended | own, keys)
    return ended | own


def _jobs(settings: Settings) -> Iterator[Job]:
    for name, variant in settings.variants.items():
        for seed in variant.seeds:
            yield from (Job(name, seed, row) for row in settings.rows)


def _keys(settings: Settings, jobs: Sequence[Job]) -> dict[Job, Key]:
    keys = {}
    for name, variant in settings.variants.items():
        parent = _parent(variant)
        corpus = _corpus(settings, recipe_of(settings, variant, parent, entropy_regularised=False), parent)
        for job in jobs:
            if job.variant == name:
                keys[job] = Key(candidate_id(candidate_of(settings, job, parent)), corpus.fingerprint, job.seed)
    return keys


def _write(path: Path, ended: Mapping[Job, Ended], keys: Mapping[Job, Key]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*Key._fields, "row", "variant", *Ended._fields])
    for job, one in ended.items():
        perplexity = "" if one.perplexity is None else f"{one.perplexity:.6g}"
        cells = [perplexity, one.tokens, f"{one.seconds:.0f}", one.reason]
        writer.writerow([*keys[job], job.row, job.variant, *cells])
    replace_file(path, text.getvalue())


def _read(path: Path) -> dict[Key, Ended]:
    """Outcomes by what they depend on. Raises UserError if a line is none."""
    try:
        with path.open(newline="") as file:
            return {
                Key(row["candidate_id"], row["corpus"], int(row["seed"])): Ended(
                    float(row["perplexity"]) if row["perplexity"] else None,
                    int(row["tokens"]),
                    float(row["seconds"]),
                    row["reason"],
                )
                for row in csv.DictReader(file)
            }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} must be the outcomes of an experiment, but: {error}.") from None


def _seconds_left(settings: Settings, left: Sequence[Job], own: Mapping[Job, Ended]) -> float:
    """Seconds left of one core, at the mean seconds a token of what was trained just now."""
    rate = sum(one.seconds for one in own.values()) / max(1, sum(one.tokens for one in own.values()))
    tokens = {
        name: recipe_of(settings, variant, _parent(variant), entropy_regularised=False).scale.tokens
        for name, variant in settings.variants.items()
    }
    return rate * sum(tokens[job.variant] for job in left)


def _perplexity(value: float | None) -> float:
    """None, a divergence, is infinite."""
    return math.inf if value is None else value


def _describe(one: Ended) -> str:
    end = f"diverged, {one.reason}" if one.perplexity is None else f"perplexity {one.perplexity:.2f}"
    return f"{end} in {format_seconds(one.seconds)}"
