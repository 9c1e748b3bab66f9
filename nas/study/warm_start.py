"""A run that begins with what another one has trained.

Its candidates that completed or diverged, with all their seeds, become trials of this run, before its first generation
and at this run's prices. The searcher knows them from the start. They count for everything but `--num-trials`: what is
within this run's budget may be on its front, and is exported from weights that are kept with it; what is beyond tells
the searcher something and nothing more. So that they are what this run would have trained itself, both runs must have
the same dimensions, recipe, parent, corpus and seed.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from costmodel.errors import UserError
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.folder import Meta, find_run, read_config, read_ledger, read_meta
from nas.run.front import is_feasible
from nas.run.ledger import LedgerIndex, Record, architecture_of, deployed_of
from nas.study.schedule import LAG
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member
from search_spaces.pricing import price_architecture
from search_spaces.space import contains

DIMENSIONS = (
    "block",
    "num_layers",
    "num_heads",
    "d_model",
    "d_ff",
    "vocab_size",
    "context",
    "bias",
    "tied_embeddings",
    "softmax",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """folder: of the other run. records: of its trials, as they are to stand in the ledger of this one."""

    folder: Path
    records: tuple[Record, ...]

    @property
    def num_trials(self) -> int:
        return sum(record.event == "finished" for record in self.records)


def read_warm_start(config: StudyConfig, feasible: FeasibleSpace, meta: Meta) -> WarmStart | None:
    """What the run named by `config` gives to a run of this space and meta; None where none is named.

    Raises UserError if there is no such run, its ledger is damaged or of a later schema, its trials are not what this
    run would train, or none of them is of use.
    """
    if config.warm_start is None:
        return None
    folder = find_run(config.warm_start)
    other, its_meta = read_config(folder), read_meta(folder)
    _check_same(folder, (config, meta), (other, its_meta))
    index = LedgerIndex(read_ledger(folder))
    trials = [
        record
        for record in sorted(index.finished.values(), key=lambda one: (one.index, one.seed))
        if record.role != "baseline" and record.status in ("completed", "diverged")
    ]
    trials = [record for record in trials if contains(feasible.space, _member(record, meta))]
    numbers = {record.index: number for number, record in enumerate(one for one in trials if one.role == "candidate")}
    found: list[Record] = []
    for record in (one for one in trials if one.index in numbers):
        own = _repriced(record, config, feasible, meta, numbers[record.index])
        rungs = [_in_place_of(own, rung) for rung in index.rungs.get(record.trial_id, {}).values()]
        first = [replace(own, event="proposed", status="proposed", reason=None)] if own.role == "candidate" else []
        found += [*first, *rungs, own]
    if not found:
        raise UserError(f"--warm-start {folder} must have trained candidates of this space, but has none.")
    return WarmStart(folder=folder, records=tuple(found))


def begin_with(warm: WarmStart, folder: Path, config: StudyConfig) -> None:
    """Writes the ledger of a new run, and keeps the weights of what may be on its front. Raises OSError."""
    for record in warm.records:
        source = warm.folder / "trials" / record.trial_id
        if record.event == "finished" and is_feasible(record, config.budget) and source.exists():
            target = folder / "trials" / record.trial_id
            shutil.copytree(source, target, copy_function=_link_or_copy, dirs_exist_ok=True)
    ledger.write(folder / ledger.FILE_NAME, warm.records)


def _check_same(folder: Path, ours: tuple[StudyConfig, Meta], theirs: tuple[StudyConfig, Meta]) -> None:
    """Raises UserError, naming the first thing that differs."""
    for name, own, other in _compared(ours, theirs):
        if own != other:
            raise UserError(
                f"--warm-start {folder} must have the {name} of this run, {own!s:.120}, but has {other!s:.120}; "
                f"its results would not be this run's: give what it has, or start without it."
            )


def _compared(ours: tuple[StudyConfig, Meta], theirs: tuple[StudyConfig, Meta]) -> Iterable[tuple[str, object, object]]:
    """What must agree: names, ours, theirs."""
    bases = ours[1].base, theirs[1].base
    yield from ((f"`{name}`", getattr(bases[0], name), getattr(bases[1], name)) for name in DIMENSIONS)
    yield "corpus", ours[1].corpus, theirs[1].corpus
    yield "tokenizer", ours[1].tokenizer, theirs[1].tokenizer
    recipes = ours[1].recipe, theirs[1].recipe
    routes = [None if recipe.route is None else recipe.route.parent for recipe in recipes]
    yield "parent", routes[0], routes[1]
    for name in type(recipes[0]).__dataclass_fields__:
        yield f"`{name}` of the recipe", getattr(recipes[0], name), getattr(recipes[1], name)
    yield "seed", ours[0].seed, theirs[0].seed


def _member(record: Record, meta: Meta) -> Member:
    return Member(architecture=architecture_of(record, meta.base), entropy_regularised=record.entropy_regularised)


def _repriced(record: Record, config: StudyConfig, feasible: FeasibleSpace, meta: Meta, index: int) -> Record:
    """The end of a trial in this run's place and at its prices: verified, and as predicted."""
    pricer = feasible.priced.pricer
    predicted = price_architecture(architecture_of(record, meta.base), pricer, config.workload, config.accounting)
    verified = price_architecture(deployed_of(record, meta.base), pricer, config.workload, config.accounting)
    folds = record.deployed is not None
    return replace(
        record,
        index=index,
        generation=-LAG,
        protocol=pricer.protocol,
        network=pricer.network,
        cost_model_id=pricer.cost_model_id,
        rounds=verified.price.rounds,
        sent_bytes=verified.price.sent_bytes,
        latency_s=verified.price.latency_s,
        latency_s_range=verified.latency_s_range,
        predicted_latency_s=predicted.price.latency_s if folds else None,
        predicted_sent_bytes=predicted.price.sent_bytes if folds else None,
    )


def _in_place_of(own: Record, rung: Record) -> Record:
    """A rung of a trial with the place and the prices of its end."""
    kept = ("event", "status", "reason", "rung", "steps", "tokens", "val_loss", "perplexity", "flags")
    return replace(own, seconds=rung.seconds, **{name: getattr(rung, name) for name in kept})


def _link_or_copy(source: str, target: str) -> None:
    """What a trial has written is never written again, so two runs on one disk share it."""
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError:
        shutil.copy2(source, target)
