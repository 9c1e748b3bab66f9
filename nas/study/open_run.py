"""From a configuration to trials that are ready to run: schedule, anchors, baselines, meta data."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.protocols.identity import is_hash_of_sources
from costmodel.protocols.published_rows import published_rows
from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.corpus.floors import ngram_floors
from nas.corpus.ngrams import NgramFloors
from nas.provenance import versions
from nas.recipe.recipe import Recipe
from nas.results import ledger
from nas.results.ledger import architecture_of
from nas.study.config import StudyConfig, study_recipe
from nas.study.run_folder import Meta, read_ledger, read_meta
from nas.study.searcher import SEARCHERS, TrialSchedule
from nas.study.trials import Trials, TrialSetting
from search_spaces.architecture import Layer
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import cheapest
from search_spaces.deployed import deployed_id
from search_spaces.notation import Member, parse
from search_spaces.pricing import price_architecture
from search_spaces.space import SearchSpace, contains, member_of, num_members
from search_spaces.workload import Workload


def published_members(space: SearchSpace) -> tuple[Member, ...]:
    """The papers' rows of this depth that the space holds, in the papers' order, each once."""
    notations = [row.notation for row in published_rows() if row.num_layers == space.base.num_layers]
    members = [parse(notation, space.base) for notation in dict.fromkeys(notations)]
    return tuple(member for member in members if contains(space, member))


def open_trials(
    config: StudyConfig, feasible: FeasibleSpace, corpus: Corpus, meta: Meta, folder: Path, *, threads: int
) -> Trials:
    """The trials of a run, its ledger replayed.

    Baselines are the published rows with LayerNorm beyond the budget. Raises UserError if the ledger is damaged before
    its last line.
    """
    published = published_members(feasible.space)
    schedule = TrialSchedule(
        strategy=SEARCHERS[config.searcher](feasible, anchors(feasible, published)),
        seed=config.seed,
        num_trials=config.num_trials,
        baselines=[member for member in published if not feasible.fits(member) and _has_norm(member)],
    )
    setting = TrialSetting(
        config=config,
        recipe=meta.recipe,
        folder=folder,
        corpus=corpus,
        device="cuda" if config.gpus_per_trial > 0 else "cpu",
        threads=threads,
        versions=versions(),
    )
    path = folder / ledger.FILE_NAME
    records = ledger.recover(path) if path.exists() else ()
    if not records and (folder / "trials").exists():
        raise UserError(f"{path} must hold the trials of {folder / 'trials'}, but is empty or gone; restore it.")
    return Trials(schedule, feasible.priced.pricer, setting, records)


def anchors(feasible: FeasibleSpace, published: Sequence[Member]) -> list[Member]:
    """What a search begins with: published rows and the cheapest member, as far as they are within the budget.

    Of rows that deploy to one architecture the last, of which folding has least to do; beside them, nets without norms
    that keep a few ReLU FFNs in their first layers, which no published row is. As written, all rows and the cheapest.
    """
    space, members = feasible.space, [*published]
    if feasible.priced.accounting == "deployed":
        by_form = {(deployed_id(one.architecture), one.entropy_regularised): one for one in published}
        members = [*by_form.values(), *_few_relus(space)]
    members.append(cheapest(feasible.priced))
    return list(dict.fromkeys(member for member in members if feasible.fits(member)))


def _few_relus(space: SearchSpace) -> list[Member]:
    depth = space.base.num_layers
    removed, kept = Layer(ffn="none"), Layer(ffn="relu")
    placements = [(kept,) * count + (removed,) * (depth - count) for count in (1, depth // 4, depth // 2)]
    members = [member_of(space, layers, entropy_regularised=space.recipes[0]) for layers in placements]
    return [member for member in members if contains(space, member)]


def _has_norm(member: Member) -> bool:
    return member.architecture.final_norm != "none"


def study_floors(recipe: Recipe, seed: int, corpus: Corpus, tell: Callable[[str], None]) -> NgramFloors:
    """What n-gram models reach of the tokens that candidates see: of the whole training side, if their parent saw it.

    What else a parent has seen nobody counts. Raises UserError if a split of the corpus has no sequence.
    """
    scale = recipe.scale
    return ngram_floors(
        corpus,
        seq_len=scale.seq_len,
        validation_tokens=scale.validation_tokens,
        tokens=scale.seen_tokens if recipe.route is None else None,
        seed=seed,
        tell=tell,
    )


def new_meta(
    config: StudyConfig,
    feasible: FeasibleSpace,
    corpus: Corpus,
    parent: Parent | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Meta:
    """What a new run is made with."""
    assert config.budget.latency_s is not None
    recipe = study_recipe(config, parent and parent.route)
    return Meta(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        hardware={"machine": platform.machine(), "cores": str(len(os.sched_getaffinity(0)))},
        cost_model_id=feasible.priced.pricer.cost_model_id,
        corpus=corpus.fingerprint,
        tokenizer=corpus.tokenizer,
        split=corpus.split,
        vocab_size=corpus.vocab_size,
        reference=(config.budget.latency_s, corpus.unigram_loss),
        num_members=num_members(feasible.space),
        num_feasible=feasible.num_feasible,
        base=feasible.space.base,
        recipe=recipe,
        parent=parent and parent.name,
        floors=study_floors(recipe, config.seed, corpus, tell),
    )


def checked_meta(folder: Path, config: StudyConfig, pricer: Pricer, corpus: Corpus) -> Meta:
    """The meta of a run to resume. Raises UserError if prices or data are no longer those it was made with."""
    meta = read_meta(folder)
    if is_hash_of_sources(meta.cost_model_id) and _prices_are_present(folder, meta, pricer, config.workload):
        meta = replace(meta, cost_model_id=pricer.cost_model_id)
    present = {
        "cost_model_id": pricer.cost_model_id,
        "corpus": corpus.fingerprint,
        "tokenizer": corpus.tokenizer,
    }
    for name, found in present.items():
        if getattr(meta, name) != found:
            raise UserError(
                f"`{name}` of {folder} must be the present one, {found}, but is {getattr(meta, name)}; "
                f"results of different {name} are never mixed: start a new run."
            )
    return meta


def _prices_are_present(folder: Path, meta: Meta, pricer: Pricer, workload: Workload) -> bool:
    """Whether the cost model prices every trial of a ledger as it was priced then, to the last bit."""
    priced = {record.placement: record for record in read_ledger(folder)}
    return all(
        (record.latency_s, record.sent_bytes, record.rounds) == (now.latency_s, now.sent_bytes, now.rounds)
        for record in priced.values()
        for now in [price_architecture(architecture_of(record, meta.base), pricer, workload, "written").price]
    )
