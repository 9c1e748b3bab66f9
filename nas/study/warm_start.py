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
from dataclasses import dataclass, fields, replace
from pathlib import Path

from costmodel.errors import UserError
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.folder import Meta
from nas.run.front import is_feasible
from nas.run.ledger import LedgerIndex, Record, architecture_of, deployed_of
from nas.run.run import Run
from nas.study.prices import price_fields, prices_of
from nas.study.schedule import LAG
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member
from search_spaces.space import contains

OF_MEMBERS = ("layers", "final_norm", "gelu", "folded")  # fields in which members of a space may differ
DIMENSIONS = ("num_layers", *(field.name for field in fields(Architecture) if field.name not in OF_MEMBERS))


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """folder: of the other run. records: of its trials, as they are to stand in the ledger of this one."""

    folder: Path
    records: tuple[Record, ...]

    @property
    def num_trials(self) -> int:
        return sum(record.event == "finished" for record in self.records)


def read_warm_start(config: StudyConfig, feasible: FeasibleSpace, meta: Meta) -> WarmStart | None:
    """Reads what the run named by `config` gives to a run of this space and meta; None where none is named.

    Raises UserError if there is no such run, its ledger is damaged or of a later schema, its trials are not what this
    run would train, or none of them is of use.
    """
    if config.warm_start is None:
        return None
    other = Run.find(config.warm_start)
    for name, ours, theirs in _compared(config, meta, other):
        if ours != theirs:
            raise UserError(
                f"--warm-start {other.folder} must have the {name} of this run, {ours!s:.120}, but has "
                f"{theirs!s:.120}; its results would not be this run's: give what it has, or start without it."
            )
    index, records, numbers = LedgerIndex(other.records), list[Record](), dict[int, int]()
    for _, record in sorted(index.finished.items()):  # of each candidate its replicates last
        if record.role == "baseline" or record.status not in ("completed", "diverged"):
            continue
        architecture = architecture_of(record, meta.base)
        if not contains(
            feasible.space, Member(architecture=architecture, entropy_regularised=record.entropy_regularised)
        ):
            continue
        if record.role == "candidate":
            numbers[record.index] = len(numbers)
        if record.index in numbers:
            end = _repriced(record, feasible, meta, numbers[record.index])
            if end.role == "candidate":
                records.append(replace(end, event="proposed", status="proposed", reason=None))
            records += [_in_place_of(end, rung) for rung in index.rungs.get(record.trial_id, {}).values()]
            records.append(end)
    if not records:
        raise UserError(f"--warm-start {other.folder} must have trained candidates of this space, but has none.")
    return WarmStart(folder=other.folder, records=tuple(records))


def begin_with(warm: WarmStart, folder: Path, config: StudyConfig) -> None:
    """Writes the ledger of a new run, and keeps the weights of what may be on its front. Raises OSError."""
    for record in warm.records:
        source = warm.folder / "trials" / record.trial_id
        if record.event == "finished" and is_feasible(record, config.budget) and source.exists():
            target = folder / "trials" / record.trial_id
            shutil.copytree(source, target, copy_function=_link_or_copy, dirs_exist_ok=True)
    ledger.write(folder / ledger.FILE_NAME, warm.records)


def _compared(config: StudyConfig, meta: Meta, other: Run) -> Iterable[tuple[str, object, object]]:
    """Yields everything that must agree: names, ours, theirs."""
    for name in DIMENSIONS:
        yield f"`{name}`", getattr(meta.base, name), getattr(other.base, name)
    yield "corpus", meta.corpus, other.meta.corpus
    yield "tokenizer", meta.tokenizer, other.meta.tokenizer
    ours, theirs = meta.recipe, other.meta.recipe
    yield "parent", ours.route and ours.route.parent, theirs.route and theirs.route.parent
    for field in fields(ours):
        yield f"`{field.name}` of the recipe", getattr(ours, field.name), getattr(theirs, field.name)
    yield "seed", config.seed, other.config.seed


def _repriced(record: Record, feasible: FeasibleSpace, meta: Meta, index: int) -> Record:
    """The end of a trial in this run's place and at its prices: verified, and as predicted."""
    verified = prices_of(deployed_of(record, meta.base), feasible)
    predicted = None if record.deployed is None else prices_of(architecture_of(record, meta.base), feasible)
    return replace(record, index=index, generation=-LAG, **price_fields(verified, predicted, feasible))


def _in_place_of(end: Record, rung: Record) -> Record:
    """A rung of a trial with the place and the prices of its end."""
    kept = ("event", "status", "reason", "rung", "steps", "tokens", "val_loss", "perplexity", "flags")
    return replace(end, seconds=rung.seconds, **{name: getattr(rung, name) for name in kept})


def _link_or_copy(source: str, target: str) -> None:
    """Links a file, as a trial never writes one again, so that two runs on one disk share it."""
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError:
        shutil.copy2(source, target)
