"""Opens a run: from a configuration to trials that are ready, with schedule, anchors, baselines, meta data."""

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN, Parent
from nas.corpus.corpus import Corpus
from nas.corpus.ngram_baseline import ngram_baseline
from nas.corpus.ngrams import TRIGRAM
from nas.provenance import versions
from nas.recipe.distillation import parent_architecture
from nas.recipe.overrides import RecipeChanges
from nas.recipe.recipe import Recipe
from nas.run import ledger
from nas.run.config import StudyConfig, study_recipe
from nas.run.folder import Meta, SecondCorpus, read_meta
from nas.run.ledger import Record, architecture_of
from nas.searchers.anchors import SEQ_LEN, TOKENS, anchors, known_trainings, published_members
from nas.searchers.strategy import SearchProblem, searcher_of
from nas.study.parent import parent_result
from nas.study.schedule import Proposal, TrialSchedule
from nas.study.trials import Trials, TrialSetting
from nas.training.batches import validate
from nas.training.distillation.sub_layers import BlockScores
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member, placement
from search_spaces.space import num_members


def open_trials(
    config: StudyConfig,
    feasible: FeasibleSpace,
    corpus: Corpus,
    meta: Meta,
    folder: Path,
    *,
    blocks: BlockScores | None = None,
    second: Corpus | None = None,
    on_end: Callable[[Record], None] = lambda record: None,
) -> Trials:
    """The trials of a run, its ledger replayed.

    config: resolved. Baselines are the published rows with LayerNorm beyond the budget, but for the parent. blocks:
    scores of the parent's, for searchers that read them. on_end: as `Trials` has it.

    Raises UserError if the ledger is damaged before its last line.
    """
    assert config.generation_size is not None
    assert config.gpus_per_trial is not None
    path = folder / ledger.FILE_NAME
    records = ledger.recover(path) if path.exists() else ()
    if not records and (folder / "trials").exists():
        raise UserError(f"{path} must hold the trials of {folder / 'trials'}, but is empty or gone; restore it.")
    published = published_members(feasible.space)
    schedule = TrialSchedule(
        strategy=searcher_of(config.searcher)(search_problem(config, feasible, meta, blocks)),
        seed=config.seed,
        num_trials=config.num_trials,
        num_looks=config.most_looks,
        baselines=[member for member in published if not feasible.fits(member) and _is_baseline(member, meta)],
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
        corpus=corpus,
        device="cuda" if config.gpus_per_trial > 0 else "cpu",
        versions=versions(),
        second=second,
    )
    return Trials(schedule, feasible, setting, records, on_end)


def require_knowledge(config: StudyConfig, parent: Parent | None, recipe: Recipe) -> None:
    """Raises UserError for trainings that come with the builtin parent where another parent or recipe is asked for."""
    is_builtin = parent is not None and parent.name == BUILTIN
    usual = (recipe.scale.tokens, recipe.scale.seq_len) == (TOKENS, SEQ_LEN) and config.recipe == RecipeChanges()
    if config.knowledge == "shipped" and not (is_builtin and usual and config.kept_layers is None):
        raise UserError(
            f"--knowledge shipped is of the builtin parent, trained on {TOKENS:,} tokens in sequences of {SEQ_LEN} by "
            f"the usual recipe, but candidates start from {'nothing' if parent is None else parent.name}, on "
            f"{recipe.scale.tokens:,} in sequences of {recipe.scale.seq_len}; leave it out."
        )


def search_problem(
    config: StudyConfig,
    feasible: FeasibleSpace,
    meta: Meta,
    blocks: BlockScores | None = None,
) -> SearchProblem:
    """Everything a searcher may know before anything is trained.

    From a parent, what knows less than a trigram is no answer to anyone; from scratch few know more. At a parent's own
    size nothing is that has half as much perplexity again; nothing heals what the anchors lack, and block scores say
    what to begin with.
    """
    route, parent = meta.recipe.route, meta.parent
    reference_loss = meta.reference[1]
    if parent is not None and config.scale == "parent":
        reference_loss = parent.val_loss + math.log(1.5)
    elif route is not None and meta.ngrams is not None:
        reference_loss = meta.ngrams.losses[TRIGRAM - 1]
    return SearchProblem(
        feasible=feasible,
        anchors=() if config.scale == "parent" else tuple(anchors(feasible, published_members(feasible.space))),
        reference_loss=reference_loss,
        parent=None if route is None else parent_architecture(route, feasible.space.base),
        parent_loss=None if parent is None else parent.val_loss,
        heals_shortly=config.scale == "parent",
        blocks=blocks,
        known=known_trainings(feasible.space, parent.val_loss) if parent and config.knowledge == "shipped" else (),
    )


def proposals_of(records: Sequence[Record], base: Architecture) -> list[Proposal]:
    """Proposals of a ledger, in order."""
    return [
        Proposal(
            index=record.index,
            generation=record.generation,
            role=record.role,
            member=Member(architecture=architecture_of(record, base), entropy_regularised=record.entropy_regularised),
            is_look=record.is_look,
            expected=record.expected_loss,
            is_known=record.is_known,
        )
        for record in records
        if record.event == "proposed"
    ]


def _is_baseline(member: Member, meta: Meta) -> bool:
    """Whether a published row has LayerNorm, and is not the parent, whose perplexity is known."""
    route = meta.recipe.route
    is_parent = route is not None and placement(member.architecture) == route.placement
    return member.architecture.final_norm != "none" and not is_parent


def new_meta(
    config: StudyConfig,
    feasible: FeasibleSpace,
    corpus: Corpus,
    second: Corpus | None,
    parent: Parent | None,
    log: Callable[[str], None],
    device: str = "cpu",
) -> Meta:
    """The meta of a new run. Raises UserError if a split of the corpus has no sequence.

    N-grams are of the tokens that candidates see, of the whole training side if their parent saw it; what else a parent
    has seen nobody counts.
    """
    assert config.budget.latency_s is not None
    recipe = study_recipe(config, parent and parent.route)
    scale = recipe.scale
    ngrams = partial(
        ngram_baseline,
        corpus,
        seq_len=scale.seq_len,
        validation_tokens=scale.validation_tokens,
        tokens=scale.seen_tokens if parent is None else None,
        seed=config.seed,
        log=log,
    )
    return Meta(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        hardware={"machine": platform.machine(), "cores": str(len(os.sched_getaffinity(0)))},
        cost_model_id=_cost_model_ids(feasible),
        corpus=corpus.fingerprint,
        tokenizer=corpus.tokenizer,
        split=corpus.split,
        vocab_size=corpus.vocab_size,
        reference=(config.budget.latency_s, corpus.unigram_loss),
        num_members=num_members(feasible.space),
        num_feasible=feasible.num_feasible,
        base=feasible.space.base,
        recipe=recipe,
        withheld=feasible.space.definition.withheld,
        held_out=corpus.held_out,
        parent=parent and parent_result(parent, corpus, scale, feasible, device),
        ngrams=ngrams(),
        second=None
        if second is None
        else SecondCorpus(
            data=second.data,
            fingerprint=second.fingerprint,
            held_out=second.held_out,
            ngrams=ngrams(second=second),
            parent_loss=None if parent is None else validate(parent.decoder().to(device), second, scale).loss,
        ),
    )


def _cost_model_ids(feasible: FeasibleSpace) -> str:
    return ", ".join(constraint.priced.pricer.cost_model_id for constraint in feasible.every)


def checked_meta(folder: Path, config: StudyConfig, feasible: FeasibleSpace, corpus: Corpus) -> Meta:
    """The meta of a run to resume, under a budget that may be another than it had.

    Raises UserError if prices or data are no longer those it was made with.
    """
    meta = read_meta(folder)
    present = {
        "cost_model_id": _cost_model_ids(feasible),
        "corpus": corpus.fingerprint,
        "tokenizer": corpus.tokenizer,
    }
    for name, value in present.items():
        if getattr(meta, name) != value:
            raise UserError(
                f"`{name}` of {folder} must be the present one, {value}, but is {getattr(meta, name)}; "
                f"results of different {name} are never mixed: start a new run."
            )
    assert config.budget.latency_s is not None
    reference = config.budget.latency_s, meta.reference[1]
    return replace(meta, reference=reference, num_feasible=feasible.num_feasible)
