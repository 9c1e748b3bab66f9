"""Resumable trainings of an experiment, in one single-threaded process per core. Their results are saved as a table.

Every training saves checkpoints, so that an interrupted run resumes. Results are written to `outcomes.csv` beside the
checkpoints, where other plans with the same folder find them; results that took hours are committed in
`experiments/data`. A result is used only while recipe and corpus are those of its training.
"""

import csv
import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
from rich.console import Console

from costmodel.config.units import format_seconds
from costmodel.errors import UserError
from nas.conversion.parent import Parent, load_parent
from nas.corpus.corpus import Corpus, prepare
from nas.malloc import keep_freed_memory
from nas.recipe.candidate import Candidate, candidate_id, recipe_at, trial_id
from nas.recipe.recipe import SCALES, ScaleName
from nas.storage import write_csv
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
class Plan:
    """The trainings to run: all rows with the first seed, then all with the next seed, and so on.

    Attributes:
        name: For reports and tables.
        base, dimensions, rows: A named base, changes of its dimensions, and names of architectures on it.
        parent: Where candidates start: `builtin`, a file or a folder.
        data: As for --data.
        committed: A file of outcomes in `experiments/data`.
    """

    name: str
    scale: ScaleName
    base: str
    dimensions: Dimensions = field(default_factory=Dimensions)
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    parent: str
    data: str
    committed: str


class Job(NamedTuple):
    """One training of a plan: one of its `rows` with one of its `seeds`."""

    seed: int
    row: str


class Key(NamedTuple):
    """The inputs that determine the result of a training. corpus: its fingerprint."""

    candidate_id: str
    corpus: str
    seed: int


class Rung(NamedTuple):
    """A validation during a training, after a share of its tokens, from 0 to 1. loss: nats per token."""

    share: float
    loss: float


class Ended(NamedTuple):
    """The result of a training. perplexity: None if it diverged. reason: why it did. rungs: earlier validations."""

    perplexity: float | None
    tokens: int
    seconds: float
    reason: str
    rungs: tuple[Rung, ...] = ()


COLUMNS = (*Key._fields, "row", "variant", *Ended._fields)


class Recorded(NamedTuple):
    """A saved result of a training. row: the architecture's name. variant: the plan's name."""

    key: Key
    row: str
    variant: str
    ended: Ended


def _candidate(plan: Plan, row: str, parent: Parent) -> Candidate:
    """Return the architecture that a row names, with the recipe of the plan's scale from the parent."""
    member = resolve(row, base_architecture(plan.base, plan.dimensions))
    regularised, distillation = member.entropy_regularised, parent.distillation
    recipe = recipe_at(plan.scale, plan.data, entropy_regularised=regularised, distillation=distillation)
    return Candidate(architecture=member.architecture, recipe=recipe)


def training(plan: Plan, job: Job, folder: Path) -> Ended:
    """Run or resume one training in this process, with one thread, and return its result."""
    torch.set_num_threads(1)
    keep_freed_memory()
    parent = load_parent(plan.parent)
    candidate, corpus = _candidate(plan, job.row, parent), _corpus(plan, parent)
    *records, outcome = train(
        candidate,
        corpus,
        seed=job.seed,
        folder=folder / trial_id(candidate, seed=job.seed),
        initial=initial_weights(parent, candidate, corpus),
        teacher=teacher_of(parent, corpus, candidate.recipe, "cpu"),
    )
    assert isinstance(outcome, Outcome)
    earlier = (record for record in records if isinstance(record, RungRecord) and record.share < 1)
    rungs = tuple(Rung(record.share, record.val_loss) for record in earlier)
    return Ended(outcome.perplexity, outcome.tokens, outcome.seconds, outcome.reason or "", rungs)


def _corpus(plan: Plan, parent: Parent) -> Corpus:
    model = parent.model
    vocab_size = SCALES[plan.scale].vocab_size or base_architecture(plan.base, plan.dimensions).vocab_size
    return prepare(plan.data, vocab_size=vocab_size, tokenizer=model.tokenizer, of_parent=model.windows)


def training_pool() -> Executor:
    """Return a pool of single-threaded processes, one per usable core, each started by its first job."""
    os.environ.update(worker_env(threads=1))
    return ProcessPoolExecutor(
        max_workers=len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")
    )


def train_all(plan: Plan, folder: Path, console: Console) -> dict[Job, Ended]:
    """Return the result of each training of a plan. What has no saved result is trained, in parallel on all cores."""
    parent = load_parent(plan.parent)
    corpus = _corpus(plan, parent)  # prepared once, before the processes need it
    keys = {
        Job(seed, row): Key(candidate_id(_candidate(plan, row, parent)), corpus.fingerprint, seed)
        for seed in plan.seeds
        for row in plan.rows
    }
    committed = read_outcomes(DATA / plan.committed)
    saved = read_outcomes(folder / OUTCOMES_FILE) if (folder / OUTCOMES_FILE).exists() else []
    known, earlier = ({record.key: record.ended for record in records} for records in (committed, saved))
    # an outcome without its folder has no diagnostics
    kept = {key for key in earlier if any(folder.glob(f"{key.candidate_id}-s{key.seed}-a*"))}
    if num := sum(key in known for key in keys.values()):
        console.print(f"{plan.name}: {num} of {len(keys)} trainings are committed")
    ended = {job: known.get(key) or earlier[key] for job, key in keys.items() if key in known or key in kept}
    new, num_workers = dict[Job, Ended](), len(os.sched_getaffinity(0))
    with training_pool() as workers:
        futures = {workers.submit(training, plan, job, folder): job for job in keys if job not in ended}
        try:
            for future in as_completed(futures):
                job = futures[future]
                new[job] = end = future.result()
                left_s = mean(one.seconds for one in new.values()) * (len(futures) - len(new)) / num_workers
                how = f"diverged, {end.reason}" if end.perplexity is None else f"perplexity {end.perplexity:.2f}"
                console.print(
                    f"{plan.name} seed {job.seed} {job.row}: {how} in {format_seconds(end.seconds)}; "
                    f"{len(ended) + len(new)} of {len(keys)}, about {format_seconds(left_s)} left"
                )
                _add(folder / OUTCOMES_FILE, plan, keys, ended | new)
        finally:  # after an error or Ctrl-C no further training starts
            for future in futures:
                future.cancel()
    return ended | new


def _add(path: Path, plan: Plan, keys: Mapping[Job, Key], ended: Mapping[Job, Ended]) -> None:
    """Write the results of a plan into a file, beside those of other plans that it has."""
    known = read_outcomes(path) if path.exists() else []
    records = [Recorded(keys[job], job.row, plan.name, end) for job, end in ended.items()]
    rows = []
    for key, row, variant, end in {record.key: record for record in (*known, *records)}.values():
        perplexity = "" if end.perplexity is None else f"{end.perplexity:.6g}"
        rungs = " ".join(f"{rung.share:g}:{rung.loss:.6g}" for rung in end.rungs)
        rows.append([*key, row, variant, perplexity, end.tokens, f"{end.seconds:.3f}", end.reason, rungs])
    write_csv(path, COLUMNS, rows)


def read_outcomes(path: Path) -> list[Recorded]:
    """Return the results in a file that `train_all` wrote; raise UserError if it is missing or has an invalid line."""
    records = []
    try:
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                key = Key(line["candidate_id"], line["corpus"], int(line["seed"]))
                perplexity = float(line["perplexity"]) if line["perplexity"] else None
                rungs = tuple(Rung(*map(float, pair.split(":"))) for pair in line["rungs"].split())
                ended = Ended(perplexity, int(line["tokens"]), float(line["seconds"]), line["reason"], rungs)
                records.append(Recorded(key, line["row"], line["variant"], ended))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} must be the outcomes of an experiment, but: {error}.") from None
    return records
