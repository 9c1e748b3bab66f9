"""Resumable trainings of an experiment, one thread on every core, whose results are saved as a table.

Every training saves checkpoints, so that an interrupted run resumes. Results are written to `outcomes.csv` beside them,
where other plans with the same folder find them; those that took hours are committed in `experiments/data`. Both are
used only while recipe and corpus are unchanged.
"""

import csv
import math
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from rich.console import Console

from costmodel.config.units import format_seconds
from costmodel.errors import UserError
from experiments.bars import write_csv
from nas.conversion.parent import Parent, load_parent
from nas.corpus.corpus import Corpus, prepare
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate, candidate_id, trial_id
from nas.recipe.overrides import RecipeChanges, changed
from nas.recipe.papers import recipe_at
from nas.recipe.recipe import Recipe, ScaleName
from nas.study.worker import worker_env
from nas.training.distillation.library import initial_weights
from nas.training.distillation.teacher import teacher_of
from nas.training.outcome import Outcome, RungRecord
from nas.training.trainer import train
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.resolve import resolve

DATA = Path(__file__).parent / "data"
OUTCOMES_FILE = "outcomes.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Changes to the recipe of a scale, and the seeds to train with; None keeps the recipe's value.

    Attributes:
        parent: Where candidates start, `builtin` or a folder; the changes then apply to the recipe from a parent.
        recipe: As `nas.train --recipe.*`.
    """

    seeds: tuple[int, ...]
    parent: str | None = None
    tokens: int | None = None
    recipe: RecipeChanges = field(default_factory=RecipeChanges)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The trainings to run: every row, a placement of the base, with every variant and its seeds.

    All rows are trained with one seed before any with the next. `variants` are by the name of a column; `committed` is
    a file of outcomes in `experiments/data`; `pairs` are the wanted (variant, row), None for all.
    """

    scale: ScaleName
    base: str
    rows: tuple[str, ...]
    variants: Mapping[str, Variant]
    data: str = "stdlib"
    committed: str | None = None
    pairs: frozenset[tuple[str, str]] | None = None
    dimensions: Dimensions = field(default_factory=Dimensions)


class Job(NamedTuple):
    """One training."""

    variant: str
    seed: int
    row: str


class Key(NamedTuple):
    """The inputs that determine the result of a training."""

    candidate_id: str
    corpus: str
    seed: int


class Rung(NamedTuple):
    """A validation during a training, after a share of its tokens; the loss is in nats."""

    share: float
    loss: float


class Ended(NamedTuple):
    """The result of a training; `perplexity` is None if it diverged, `rungs` are earlier validations in order."""

    perplexity: float | None
    tokens: int
    seconds: float
    reason: str
    rungs: tuple[Rung, ...] = ()

    @property
    def ranked(self) -> float:
        """The perplexity, infinite if it diverged."""
        return math.inf if self.perplexity is None else self.perplexity


COLUMNS = (*Key._fields, "row", "variant", *Ended._fields)


class Recorded(NamedTuple):
    """A saved result of a training."""

    key: Key
    row: str
    variant: str
    ended: Ended


def candidate_of(plan: Plan, job: Job, parent: Parent | None) -> Candidate:
    """Return the candidate that a job trains."""
    member = resolve(job.row, base_architecture(plan.base, plan.dimensions))
    variant = plan.variants[job.variant]
    recipe = recipe_at(
        plan.scale,
        plan.data,
        entropy_regularised=member.entropy_regularised,
        distillation=parent and parent.distillation,
        tokens=variant.tokens,
    )
    return Candidate(architecture=member.architecture, recipe=changed(recipe, variant.recipe))


def training(plan: Plan, job: Job, folder: Path) -> Ended:
    """Run or resume one training in this process, with one thread, and return its result."""
    torch.set_num_threads(1)
    keep_freed_memory()
    parent = _parent(plan.variants[job.variant])
    candidate = candidate_of(plan, job, parent)
    corpus = _corpus(plan, candidate.recipe, parent)
    more: dict[str, Any] = {}
    if parent is not None:
        teacher = teacher_of(parent, corpus, candidate.recipe, "cpu")
        more = {"initial": initial_weights(parent, candidate, corpus), "teacher": teacher}
    place = training_folder(plan, job, folder)
    *records, outcome = train(candidate, corpus, seed=job.seed, folder=place, **more)
    assert isinstance(outcome, Outcome)
    earlier = (record for record in records if isinstance(record, RungRecord) and record.share < 1)
    rungs = tuple(Rung(record.share, record.val_loss) for record in earlier)
    return Ended(outcome.perplexity, outcome.tokens, outcome.seconds, outcome.reason or "", rungs)


def training_folder(plan: Plan, job: Job, folder: Path) -> Path:
    """Return the folder of a training's checkpoints, metrics and diagnostics."""
    return folder / trial_id(_candidate(plan, job), seed=job.seed)


def _candidate(plan: Plan, job: Job) -> Candidate:
    return candidate_of(plan, job, _parent(plan.variants[job.variant]))


def _parent(variant: Variant) -> Parent | None:
    return None if variant.parent is None else load_parent(variant.parent)


def _corpus(plan: Plan, recipe: Recipe, parent: Parent | None) -> Corpus:
    vocab_size = recipe.scale.vocab_size or base_architecture(plan.base, plan.dimensions).vocab_size
    model = parent and parent.model
    return prepare(
        plan.data, vocab_size=vocab_size, tokenizer=model and model.tokenizer, of_parent=model and model.windows
    )


def training_pool() -> Executor:
    """Return a pool of single-threaded processes, one per usable core, each started by its first job."""
    os.environ.update(worker_env(threads=1))
    return ProcessPoolExecutor(max_workers=_num_workers(), mp_context=multiprocessing.get_context("spawn"))


def _num_workers() -> int:
    return len(os.sched_getaffinity(0))


def train_all(plan: Plan, folder: Path, console: Console) -> dict[Job, Ended]:
    """Train in the order of the YAML, in parallel on the usable cores, and report each result."""
    jobs = [
        Job(name, seed, row)
        for name, variant in plan.variants.items()
        for seed in variant.seeds
        for row in plan.rows
        if plan.pairs is None or (name, row) in plan.pairs
    ]
    keys = _keys(plan, jobs)  # prepares the corpora once, before the processes need them
    known = _known(DATA / plan.committed) if plan.committed else {}
    ended = {job: known[key] for job, key in keys.items() if key in known}
    earlier = _known(folder / OUTCOMES_FILE) if (folder / OUTCOMES_FILE).exists() else {}
    # an outcome without its folder has no diagnostics
    kept = {key for key in earlier if any(folder.glob(f"{key.candidate_id}-s{key.seed}-a*"))}
    before = {job: earlier[key] for job, key in keys.items() if key in kept}
    for name in plan.variants:
        if num := sum(job.variant == name for job in ended):
            console.print(f"{name}: {num} of {sum(job.variant == name for job in jobs)} trainings are committed")
    ended = before | ended
    new = dict[Job, Ended]()
    with training_pool() as workers:
        futures = {workers.submit(training, plan, job, folder): job for job in jobs if job not in ended}
        try:
            for future in as_completed(futures):
                job = futures[future]
                new[job] = future.result()
                left = [other for other in futures.values() if other not in new]
                left_s, end = _seconds_left(plan, left, new) / _num_workers(), new[job]
                how = f"diverged, {end.reason}" if end.perplexity is None else f"perplexity {end.perplexity:.2f}"
                console.print(
                    f"{job.variant} seed {job.seed} {job.row}: {how} in {format_seconds(end.seconds)}; "
                    f"{len(ended) + len(new)} of {len(jobs)}, about {format_seconds(left_s)} left"
                )
                records = [Recorded(keys[job], job.row, job.variant, end) for job, end in (ended | new).items()]
                _write(folder / OUTCOMES_FILE, records)
        finally:  # after an error or Ctrl-C no further training starts
            for future in futures:
                future.cancel()
    return ended | new


def _keys(plan: Plan, jobs: Sequence[Job]) -> dict[Job, Key]:
    keys = {}
    for name, variant in plan.variants.items():
        parent = _parent(variant)
        candidates = {job: candidate_of(plan, job, parent) for job in jobs if job.variant == name}
        if candidates:  # all have one scale, and thus one corpus
            corpus = _corpus(plan, next(iter(candidates.values())).recipe, parent)
            for job, candidate in candidates.items():
                keys[job] = Key(candidate_id(candidate), corpus.fingerprint, job.seed)
    return keys


def _write(path: Path, records: Iterable[Recorded]) -> None:
    known = read_outcomes(path) if path.exists() else []
    rows = []
    for key, row, variant, ended in {record.key: record for record in (*known, *records)}.values():
        perplexity = "" if ended.perplexity is None else f"{ended.perplexity:.6g}"
        rungs = " ".join(f"{rung.share:g}:{rung.loss:.6g}" for rung in ended.rungs)
        rows.append([*key, row, variant, perplexity, ended.tokens, f"{ended.seconds:.3f}", ended.reason, rungs])
    write_csv(path, COLUMNS, rows)


def read_outcomes(path: Path) -> list[Recorded]:
    """Return the results in a file that `train_all` wrote; a UserError is raised for an invalid line."""
    try:
        with path.open(newline="") as file:
            return [_recorded(line) for line in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} must be the outcomes of an experiment, but: {error}.") from None


def _known(path: Path) -> dict[Key, Ended]:
    return {record.key: record.ended for record in read_outcomes(path)}


def _recorded(line: Mapping[str, str]) -> Recorded:
    perplexity = float(line["perplexity"]) if line["perplexity"] else None
    rungs = tuple(Rung(*map(float, pair.split(":"))) for pair in line["rungs"].split())
    ended = Ended(perplexity, int(line["tokens"]), float(line["seconds"]), line["reason"], rungs)
    return Recorded(Key(line["candidate_id"], line["corpus"], int(line["seed"])), line["row"], line["variant"], ended)


def _seconds_left(plan: Plan, left: Sequence[Job], new: Mapping[Job, Ended]) -> float:
    """Estimate the remaining core seconds from each variant's trainings, or from the mean rate for a new variant."""
    seconds: dict[str, list[float]] = {}
    for job, ended in new.items():
        seconds.setdefault(job.variant, []).append(ended.seconds)
    rate = sum(ended.seconds for ended in new.values()) / max(1, sum(ended.tokens for ended in new.values()))
    expected = {
        name: mean(seconds[name]) if name in seconds else rate * _candidate(plan, job).recipe.scale.tokens
        for name, job in {job.variant: job for job in left}.items()
    }
    return sum(expected[job.variant] for job in left)
