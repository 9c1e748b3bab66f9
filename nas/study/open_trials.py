"""Prepares the trials of a study: block scores, training tokens that fit the time, searcher, schedule and ledger."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console

from costmodel.config.files import MOST_YAML, read_text
from costmodel.config.units import format_seconds
from costmodel.errors import UserError
from costmodel.protocols.published import published_rows
from nas.corpus.ngrams import TRIGRAM
from nas.provenance import versions
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import parent_architecture
from nas.report.progress import share_progress
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.folder import Meta, write_config, write_meta
from nas.run.ledger import Record, architecture_of
from nas.searchers.strategy import SearchProblem, Suggestion, searcher_of
from nas.storage import replace_file
from nas.study.meta import new_meta
from nas.study.resolve import ResolvedStudy, device_of
from nas.study.schedule import TrialSchedule
from nas.study.throughput import WINDOW_S, threads, training_rate
from nas.study.time_budget import MARGIN, TimeBudget, num_equivalent_steps
from nas.study.trials import Trials, TrialSetting
from nas.training.distillation.library import block_scores, settings_of
from nas.training.distillation.sub_layers import BlockScores, from_csv, to_csv
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member, parse, placement
from search_spaces.space import SearchSpace, contains

_log = logging.getLogger(__name__)

BLOCKS_FILE = "blocks.csv"
BLOCK_READERS = ("trellis",)  # searchers that use block scores
LEAST_ENDS = 3  # final trainings that should fit in the time: with the parent, enough for a front
LEAST_SHARE = 0.25  # of the planned tokens; after fewer, losses say little about the order of candidates
CAREFUL_S = 20.0  # time for which steps are measured again before tokens are cut, in case the machine was briefly busy
STARTING_S = 20.0  # time until Ray, its workers and a candidate's initial weights are ready
TEACHER_COST = 1 / 3  # time of the parent's forward pass, as a share of a step without a parent
# Medians of 150 placements from the builtin parent (`experiments/data/table-12.csv`) at rungs, where the learning rate
# is still high; hence "at most".
COST = "at most about 14 % of perplexity with half of the tokens, and 40 % with a quarter"


def start_trials(
    study: ResolvedStudy, console: Console, on_end: Callable[[Record], None], budget: TimeBudget
) -> Trials:
    """Write meta.json and run.yaml, score the parent's blocks if needed, and return the trials (`open_trials`).

    on_end: called with the record of every trial that ended. budget: time budget; if it is too short, candidates of a
    run without a ledger get fewer training tokens (`affordable`).

    Raises UserError if saved block scores are damaged, and as `open_trials`; StoppedError if scoring is predicted to
    end after the time limit; OSError if a file cannot be written.
    """
    write_meta(study.folder, study.meta)
    write_config(study.folder, study.config)
    blocks = _blocks(study, console, budget)
    budget.mark("blocks of the parent")
    if not (study.folder / ledger.FILE_NAME).exists():
        study = replace(study, meta=affordable(study, budget))
        write_meta(study.folder, study.meta)
        budget.mark("pace")
    return open_trials(study, blocks=blocks, on_end=on_end)


def _blocks(study: ResolvedStudy, console: Console, budget: TimeBudget) -> BlockScores | None:
    """Return the block scores that the searcher uses; None without a parent, or if it uses none.

    If candidates start from sub-layers that were trained on their own, these are scored, and saved. Raises UserError if
    the saved scores of the run are damaged.
    """
    config, parent, recipe = study.config, study.parent, study.meta.recipe
    if parent is None or config.searcher not in BLOCK_READERS:
        return None
    path = study.folder / BLOCKS_FILE
    if path.exists():
        return from_csv(read_text(path, MOST_YAML), str(path))
    with share_progress(console, "scoring the blocks of the parent") as show, threads(1):

        def on_progress(share: float) -> None:
            show(share)
            budget.prepare(share)

        scores = block_scores(
            parent,
            study.feasible.space.layers,
            study.corpus,
            settings_of(recipe),
            seq_len=config.sequence_len,
            first_depth=config.kept_layers or 0,
            device=device_of(config),
            keep=bool(recipe.distillation and recipe.distillation.blockwise_tokens),
            on_progress=on_progress,
        )
    replace_file(path, to_csv(scores))
    return scores


def affordable(study: ResolvedStudy, budget: TimeBudget) -> Meta:
    """Return the `Meta` of a new run, with fewer training tokens if LEAST_ENDS candidates would not end in time.

    All candidates get the same number of tokens, since losses after different numbers do not compare: at least
    LEAST_SHARE of the planned number. A number that the user has set, or that was cut before, does not change. The time
    of a step is measured on the CPU of this machine and passed to `budget`. Without a time budget or limit, on GPUs or
    on a cluster, nothing is measured or changed.
    """
    config, meta, resources = study.config, study.meta, study.resources
    if math.isinf(budget.left_s) or resources.gpus_per_trial or resources.ray_address is not None:
        return meta
    recipe, places = meta.recipe, resources.at_a_time
    scale, in_a_row = recipe.scale, math.ceil(LEAST_ENDS / places)
    for window_s in (WINDOW_S, CAREFUL_S):
        rate = training_rate(
            Candidate(architecture=meta.base, recipe=recipe),
            "cpu",
            num_threads=resources.threads_per_trial,
            num_beside=resources.threads_per_trial * (places - 1),
            window_s=window_s,
        )
        step_s = scale.batch * scale.seq_len / rate * (1 + TEACHER_COST * (recipe.distillation is not None))
        needed_s, left_s = MARGIN * step_s * num_equivalent_steps(scale) * in_a_row, budget.left_s - STARTING_S
        if needed_s <= left_s or config.tokens is not None or meta.planned_tokens is not None:
            budget.expect(step_s)
            return meta
    budget.expect(step_s)
    tokens = math.ceil(max(LEAST_SHARE, left_s / needed_s) * scale.tokens)
    _log.info(
        f"note: at {format_seconds(step_s)} a step, fewer than {LEAST_ENDS} candidates would be trained on "
        f"{scale.tokens:,} tokens in {format_seconds(left_s)}, so all are trained on {tokens:,}; this costs accuracy "
        f"({COST}), and perplexities do not compare with those of other runs; --tokens {scale.tokens} keeps them"
    )
    if study.parent is None:  # n-gram baselines count the candidates' tokens
        given = study.feasible, study.corpus, study.second, study.parent
        meta = replace(new_meta(replace(config, tokens=tokens), *given), created=meta.created, read=meta.read)
    return replace(meta, recipe=replace(recipe, scale=replace(scale, tokens=tokens)), planned_tokens=scale.tokens)


def open_trials(
    study: ResolvedStudy, *, blocks: BlockScores | None = None, on_end: Callable[[Record], None] = lambda record: None
) -> Trials:
    """Return the trials of a run, which continue from the records in its ledger.

    Baselines are those in the ledger or, if it has no proposals, the rows of the papers that are in the space, have a
    final norm and exceed the budget, except the parent. blocks: the parent's block scores, for searchers that use them.
    on_end: called with the record of every trial that ended.

    Raises UserError if a line of the ledger is damaged (an incomplete last line is dropped), if the ledger is empty or
    gone although trials have begun, or if the searcher cannot be made, as when Optuna or its sampler is missing.
    """
    config, feasible, meta, folder = study.config, study.feasible, study.meta, study.folder
    assert config.generation_size is not None
    assert config.gpus_per_trial is not None
    path = folder / ledger.FILE_NAME
    records = ledger.recover(path) if path.exists() else ()
    if not records and (folder / "trials").exists():
        raise UserError(f"{path} must hold the trials of {folder / 'trials'}, but is empty or gone; restore it.")
    # the parent is no baseline, since it was validated already
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
    """Return the rows of the papers' tables that are members of the space, without duplicates."""
    if not space.base.block_facts.has_centred_norms:  # the papers' rows have LayerNorm
        return ()
    notations = [row.notation for row in published_rows() if row.num_layers == space.base.num_layers]
    members = [parse(notation, space.base) for notation in dict.fromkeys(notations)]
    return tuple(member for member in members if contains(space, member))


def search_problem(
    config: StudyConfig, feasible: FeasibleSpace, meta: Meta, blocks: BlockScores | None = None
) -> SearchProblem:
    """Return what a searcher knows before anything is trained. blocks: the parent's block scores, if needed.

    The reference loss, in nats, is that of the trigram baseline if there is a parent and n-grams were counted, else of
    the unigram model, since few candidates from scratch beat the trigram. At scale `parent`, it is the loss at 1.5
    times the parent's perplexity.
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
        short_finetune=config.short_finetune,
        blocks=blocks,
    )


def proposals_of(records: Sequence[Record], base: Architecture) -> list[Suggestion]:
    """Return the `proposed` records of a ledger as suggestions, in order. base: dimensions of the run's members."""
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
