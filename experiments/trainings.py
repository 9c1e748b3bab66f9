"""Trainings that an experiment wants: one thread on every core, resumable, their outcomes kept as a table.

A variant is the recipe of a scale with changes: more tokens, another optimizer, a trained parent. Every training keeps
its checkpoints, so that a run that was killed goes on. What was trained is written to `outcomes.csv` beside them, where
other plans with the same folder find it; what took hours is committed in `experiments/data`, and is read from there.
Both as long as recipe and corpus are the same.
"""

import csv
import io
import math
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from rich.console import Console

from costmodel.config.units import format_seconds
from costmodel.errors import UserError
from nas.conversion.parent import Parent, load_parent
from nas.corpus.corpus import Corpus, prepare
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate, candidate_id, trial_id
from nas.recipe.overrides import RecipeChanges, changed
from nas.recipe.papers import recipe_at
from nas.recipe.recipe import Normalisation, Recipe, ScaleName, SlopeSharing
from nas.storage import replace_file
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
    """What changes the recipe of a scale, and the seeds to train with; None keeps the recipe's own value.

    parent: what candidates start from, `builtin` or a folder; the changes are then to the recipe from a parent.
    recipe: as `nas.train --recipe.*`; of a batch all sequences are in one forward pass.
    normalisation: of the weights of linears, without a parent; slopes: of leaky ReLUs; both as `nas.train` has them.

    Raises UserError for normalisation with a parent.
    """

    seeds: tuple[int, ...]
    parent: str | None = None
    tokens: int | None = None
    seq_len: int | None = None
    recipe: RecipeChanges = field(default_factory=RecipeChanges)
    normalisation: Normalisation | None = None
    slopes: SlopeSharing = "layer"

    def __post_init__(self) -> None:
        if self.parent is not None and self.normalisation is not None:
            raise UserError(f"`normalisation` does not go with a parent, but got parent {self.parent!r}; drop one.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to train: every row, a placement of the base, at every variant, by the name of a column, with its seeds.

    All rows are trained with one seed before any is with the next.

    committed: file of outcomes in `experiments/data`. pairs: the (variant, row) that are wanted; None is all of them.
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
    """What the result of a training depends on."""

    candidate_id: str
    corpus: str
    seed: int


class Rung(NamedTuple):
    """A validation on the way of a training, after this share of its tokens. loss: nats."""

    share: float
    loss: float


class Ended(NamedTuple):
    """How a training ended. perplexity: None if it diverged. rungs: before its end, in order."""

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
    """A training that was written down."""

    key: Key
    row: str
    variant: str
    ended: Ended


def recipe_of(plan: Plan, variant: Variant, parent: Parent | None, *, entropy_regularised: bool) -> Recipe:
    """The recipe of the scale with a variant's changes."""
    recipe = recipe_at(
        plan.scale,
        plan.data,
        entropy_regularised=entropy_regularised,
        route=parent and parent.route,
        seq_len=variant.seq_len,
        tokens=variant.tokens,
    )
    given = variant.recipe
    if given.scale.batch is not None:
        given = replace(given, scale=replace(given.scale, micro_batch=given.scale.batch))
    recipe = changed(recipe, given)
    return replace(recipe, normalisation=variant.normalisation, slopes=variant.slopes)


def candidate_of(plan: Plan, job: Job, parent: Parent | None) -> Candidate:
    """What a job trains."""
    member = resolve(job.row, base_architecture(plan.base, plan.dimensions))
    variant = plan.variants[job.variant]
    recipe = recipe_of(plan, variant, parent, entropy_regularised=member.entropy_regularised)
    return Candidate(architecture=member.architecture, recipe=recipe)


def training(plan: Plan, job: Job, folder: Path) -> Ended:
    """One training in this process, with one thread, from where it was to its end."""
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
    on_the_way = [record for record in records if isinstance(record, RungRecord) and record.share < 1]
    rungs = tuple(Rung(record.share, record.val_loss) for record in on_the_way)
    return Ended(outcome.perplexity, outcome.tokens, outcome.seconds, outcome.reason or "", rungs)


def training_folder(plan: Plan, job: Job, folder: Path) -> Path:
    """Where a training keeps its checkpoints, metrics and diagnostics."""
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
    """Processes of one thread, as many as this process may use cores; each starts with the first job it is given."""
    os.environ.update(worker_env(threads=1))
    return ProcessPoolExecutor(max_workers=_num_workers(), mp_context=multiprocessing.get_context("spawn"))


def _num_workers() -> int:
    return len(os.sched_getaffinity(0))


def train_all(plan: Plan, folder: Path, console: Console, pool: Executor | None = None) -> dict[Job, Ended]:
    """Trains in the order of the YAML, as many at a time as this process may use cores; tells each one's result.

    pool: of several plans, whose processes load torch once; by default one of its own.
    """
    jobs = [
        Job(name, seed, row)
        for name, variant in plan.variants.items()
        for seed in variant.seeds
        for row in plan.rows
        if plan.pairs is None or (name, row) in plan.pairs
    ]
    keys = _keys(plan, jobs)  # prepares the corpora, once, before the processes want them
    known = _known(DATA / plan.committed) if plan.committed else {}
    ended = {job: known[key] for job, key in keys.items() if key in known}
    earlier = _known(folder / OUTCOMES_FILE) if (folder / OUTCOMES_FILE).exists() else {}
    # an outcome alone has no diagnostics
    kept = {key for key in earlier if any(folder.glob(f"{key.candidate_id}-s{key.seed}-a*"))}
    before = {job: earlier[key] for job, key in keys.items() if key in kept}
    for name in plan.variants:
        if num := sum(job.variant == name for job in ended):
            console.print(f"{name}: {num} of {sum(job.variant == name for job in jobs)} trainings are committed")
    ended = before | ended
    new = dict[Job, Ended]()
    with nullcontext(pool) if pool else training_pool() as workers:
        futures = {workers.submit(training, plan, job, folder): job for job in jobs if job not in ended}
        try:
            for future in as_completed(futures):
                job = futures[future]
                new[job] = future.result()
                left = [other for other in futures.values() if other not in new]
                left_s = _seconds_left(plan, left, new) / _num_workers()
                console.print(
                    f"{job.variant} seed {job.seed} {job.row}: {_describe(new[job])}; {len(ended) + len(new)} of "
                    f"{len(jobs)}, about {format_seconds(left_s)} left"
                )
                records = [Recorded(keys[job], job.row, job.variant, end) for job, end in (ended | new).items()]
                _write(folder / OUTCOMES_FILE, records)
        finally:  # after an error or Ctrl-C nothing more begins
            for future in futures:
                future.cancel()
    return ended | new


def _keys(plan: Plan, jobs: Sequence[Job]) -> dict[Job, Key]:
    keys = {}
    for name, variant in plan.variants.items():
        parent = _parent(variant)
        candidates = {job: candidate_of(plan, job, parent) for job in jobs if job.variant == name}
        if candidates:  # all of one scale, so of one corpus
            corpus = _corpus(plan, next(iter(candidates.values())).recipe, parent)
            for job, candidate in candidates.items():
                keys[job] = Key(candidate_id(candidate), corpus.fingerprint, job.seed)
    return keys


def _write(path: Path, records: Iterable[Recorded]) -> None:
    """Adds outcomes to those of other plans in the file."""
    known = read_outcomes(path) if path.exists() else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for key, row, variant, ended in {record.key: record for record in (*known, *records)}.values():
        perplexity = "" if ended.perplexity is None else f"{ended.perplexity:.6g}"
        rungs = " ".join(f"{rung.share:g}:{rung.loss:.6g}" for rung in ended.rungs)
        writer.writerow([*key, row, variant, perplexity, ended.tokens, f"{ended.seconds:.3f}", ended.reason, rungs])
    replace_file(path, text.getvalue())


def read_outcomes(path: Path) -> list[Recorded]:
    """The outcomes in a file that `train_all` wrote. Raises UserError if a line is none."""
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
    """Seconds left of one core: of each variant as its trainings took, of one that has not begun at seconds a token."""
    seconds: dict[str, list[float]] = {}
    for job, ended in new.items():
        seconds.setdefault(job.variant, []).append(ended.seconds)
    rate = sum(ended.seconds for ended in new.values()) / max(1, sum(ended.tokens for ended in new.values()))
    expected = {
        name: mean(seconds[name]) if name in seconds else rate * _candidate(plan, job).recipe.scale.tokens
        for name, job in {job.variant: job for job in left}.items()
    }
    return sum(expected[job.variant] for job in left)


def _describe(ended: Ended) -> str:
    end = f"diverged, {ended.reason}" if ended.perplexity is None else f"perplexity {ended.perplexity:.2f}"
    return f"{end} in {format_seconds(ended.seconds)}"
