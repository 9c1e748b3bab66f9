"""Opens the trials of a resolved study: its searcher, schedule, baselines and ledger."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console

from costmodel.errors import UserError
from costmodel.protocols.published_rows import published_rows
from nas.corpus.ngrams import TRIGRAM
from nas.provenance import versions
from nas.recipe.distillation import parent_architecture
from nas.run import ledger
from nas.run.config import THREADS_PER_TRIAL, StudyConfig
from nas.run.folder import Meta, write_config, write_meta
from nas.run.ledger import Record, architecture_of
from nas.searchers.strategy import SearchProblem, Suggestion, searcher_of
from nas.study.affordable import affordable
from nas.study.blocks import study_blocks
from nas.study.resolve import ResolvedStudy
from nas.study.schedule import TrialSchedule
from nas.study.throughput import threads
from nas.study.time_budget import TimeBudget
from nas.study.trials import Trials, TrialSetting
from nas.training.distillation.sub_layers import BlockScores
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member, parse, placement
from search_spaces.space import SearchSpace, contains


def start_trials(
    study: ResolvedStudy, console: Console, on_end: Callable[[Record], None], budget: TimeBudget | None = None
) -> Trials:
    """Write the run's files, score the blocks of the parent, and open the trials.

    on_end: as in `Trials`. budget: time budget, which may reduce the tokens of a run without trials.
    """
    budget = budget or TimeBudget(None, time.monotonic())
    write_meta(study.folder, study.meta)
    write_config(study.folder, study.config)
    with threads(THREADS_PER_TRIAL):
        blocks = study_blocks(study, console, budget.prepare)
    budget.mark("blocks of the parent")
    if not (study.folder / ledger.FILE_NAME).exists():
        study = replace(study, meta=affordable(study, budget))
        write_meta(study.folder, study.meta)
        budget.mark("pace")
    return open_trials(study, blocks=blocks, on_end=on_end)


def open_trials(
    study: ResolvedStudy, *, blocks: BlockScores | None = None, on_end: Callable[[Record], None] = lambda record: None
) -> Trials:
    """Return the trials of a run, after replaying its ledger.

    Baselines are the published rows with LayerNorm that exceed the budget, except the parent. blocks: the parent's
    block scores, for searchers that use them. on_end: as in `Trials`.
    Raises UserError if the ledger is damaged before its last line.
    """
    config, feasible, meta, folder = study.config, study.feasible, study.meta, study.folder
    assert config.generation_size is not None
    assert config.gpus_per_trial is not None
    path = folder / ledger.FILE_NAME
    records = ledger.recover(path) if path.exists() else ()
    if not records and (folder / "trials").exists():
        raise UserError(f"{path} must hold the trials of {folder / 'trials'}, but is empty or gone; restore it.")
    # not the parent, whose perplexity is known already
    known = meta.recipe.distillation and meta.recipe.distillation.placement
    published = [row for row in published_members(feasible.space) if row.architecture.final_norm != "none"]
    schedule = TrialSchedule(
        strategy=searcher_of(config.searcher)(search_problem(config, feasible, meta, blocks)),
        seed=config.seed,
        num_trials=config.num_trials,
        num_proxy_evals=config.most_proxy_evals,
        baselines=[row for row in published if not feasible.fits(row) and placement(row.architecture) != known],
        finalist_seeds=config.finalist_seeds,
        most_replicates=config.most_replicates,
        reference=meta.reference,
        parent_loss=None if meta.parent is None else meta.parent.val_loss,
        known=proposals_of(records, feasible.space.base),
        generation_size=config.generation_size,
    )
    setting = TrialSetting(
        config=config,
        recipe=meta.recipe,
        folder=folder,
        corpus=study.corpus,
        device="cuda" if config.gpus_per_trial > 0 else "cpu",
        versions=versions(),
        second=study.second,
    )
    return Trials(schedule, feasible, setting, records, on_end)


def published_members(space: SearchSpace) -> tuple[Member, ...]:
    """Return the papers' rows that belong to the space, in the papers' order, without duplicates."""
    if not space.base.block_facts.has_centred_norms:  # the papers' rows have LayerNorm
        return ()
    notations = [row.notation for row in published_rows() if row.num_layers == space.base.num_layers]
    members = [parse(notation, space.base) for notation in dict.fromkeys(notations)]
    return tuple(member for member in members if contains(space, member))


def search_problem(
    config: StudyConfig, feasible: FeasibleSpace, meta: Meta, blocks: BlockScores | None = None
) -> SearchProblem:
    """Return what a searcher knows before anything is trained.

    With a parent, the reference loss is the trigram baseline's, and from scratch the unigram's, since few candidates
    beat the trigram. At a parent's own size it is 1.5 times the parent's perplexity.
    """
    distillation, parent = meta.recipe.distillation, meta.parent
    reference_loss = meta.reference[1]
    if parent is not None and config.scale == "parent":
        reference_loss = parent.val_loss + math.log(1.5)
    elif distillation is not None and meta.ngrams is not None:
        reference_loss = meta.ngrams.losses[TRIGRAM - 1]
    return SearchProblem(
        feasible=feasible,
        reference_loss=reference_loss,
        parent=None if distillation is None else parent_architecture(distillation, feasible.space.base),
        parent_loss=None if parent is None else parent.val_loss,
        short_finetune=config.scale == "parent",
        blocks=blocks,
    )


def proposals_of(records: Sequence[Record], base: Architecture) -> list[Suggestion]:
    """Return the proposals in a ledger, in order."""
    return [
        Suggestion(
            index=record.index,
            generation=record.generation,
            role=record.role,
            member=Member(architecture=architecture_of(record, base), entropy_regularised=record.entropy_regularised),
            is_proxy=record.is_proxy,
            expected=record.expected_loss,
        )
        for record in records
        if record.event == "proposed"
    ]
