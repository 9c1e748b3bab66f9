"""Prepares an export: a candidate of a run or a model of `nas.train`, folded or not, with its facts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from costmodel.config.files import decode
from costmodel.cost import shared_price
from costmodel.errors import UnpricedOpError, UserError
from costmodel.estimate import Estimate, Pricer, estimate_generation
from costmodel.protocols import load_pricer
from nas.conversion.fixed_point_check import recorded
from nas.conversion.fold import at_dimensions
from nas.conversion.pretrained import read_windows
from nas.conversion.score_bounds import bounding_tokens
from nas.conversion.verified_fold import check_tokens, fold_as_far_as
from nas.corpus.corpus import known_corpus, tokenizer_folder
from nas.corpus.held_out import KeptWindows, trained_on
from nas.recipe.candidate import Candidate, candidate_id
from nas.report.model_card import Facts, Fold, Provenance, Result
from nas.run.config import study_candidate
from nas.run.folder import PARENT_FOLDER
from nas.run.ledger import Record, architecture_of
from nas.run.run import Run
from nas.study.verify_fold import deployable
from nas.training import checkpoint
from nas.training.checkpoint import Checkpoint, TrainingProgress
from nas.training.manifest import read_training, training_tokenizer
from search_spaces.architecture import Architecture
from search_spaces.lower import Workload
from search_spaces.notation import Member


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A trained architecture, its weights by node of the op graph, and facts about them.

    tokenizer: folder of the parent's tokenizer, or of the corpus's as long as the cache has it. run: None for a
        model of `nas.train`. windows: hashes of the weights' training text, if known. fixed_point: whether it stays in
        range there, by protocol.
    """

    trained: Architecture
    weights: dict[str, Tensor]
    facts: Facts
    tokenizer: Path
    run: Run | None = None
    windows: KeptWindows | None = None
    fixed_point: Mapping[str, Any] = field(default_factory=dict)


def prepare_export(run: Run, record: Record, *, fold: bool = False) -> Export:
    """Prepare a completed trial. Raises UserError if the trial's last checkpoint is missing."""
    member = Member(architecture=architecture_of(record, run.base), entropy_regularised=record.entropy_regularised)
    candidate = study_candidate(run.meta.recipe, member)
    trial = run.folder / "trials" / record.trial_id
    last = checkpoint.load_latest(trial, {"candidate": candidate_id(candidate)})
    if last is None or last.step != record.steps:
        raise UserError(f"{trial} must have a whole checkpoint of step {record.steps}, but has none to export.")
    names = ("perplexity", "val_loss", "tokenizer", "split", "tokens", "seed", "flags")
    result = Result(ngrams=run.ngrams, **{name: getattr(record, name) for name in names})
    provenance = Provenance(
        run=run.folder.name,
        trial_id=record.trial_id,
        created=run.meta.created,
        corpus=record.corpus,
        data=run.config.data,
        budget_latency=run.config.budget_latency,
        versions=record.versions,
        cost_model_id=run.pricer.cost_model_id,
    )
    tokenizer = tokenizer_folder(record.corpus) if run.parent is None else run.folder / PARENT_FOLDER
    export = _prepared(candidate, last, run.pricer, run.workload, result, provenance, tokenizer, fold=fold)
    verified = None if record.deployed is None else record
    parents = [] if run.parent is None else [read_windows(run.folder / PARENT_FOLDER)]
    windows = _windows(record.corpus, parents)
    return replace(export, facts=replace(export.facts, verified=verified), run=run, windows=windows)


def training_export(folder: Path, *, fold: bool = False) -> Export:
    """Prepare a training's last checkpoint, with its cost under `published`, or `semi2k` if that does not cover an op.

    Raises UserError if there is no checkpoint.
    """
    training = read_training(folder)
    candidate, scale = training.candidate, training.candidate.recipe.scale
    last = checkpoint.load_latest(folder, {"candidate": candidate_id(candidate)})
    if last is None:
        raise UserError(f"{folder} must have a whole checkpoint, but has none to export; train on with --resume.")
    rungs = decode(TrainingProgress, last.progress, "the progress of a checkpoint").rungs
    rung = rungs[-1] if rungs else None
    result = Result(
        perplexity=None if rung is None else rung.perplexity,
        val_loss=None if rung is None else rung.val_loss,
        tokenizer=training.tokenizer,
        split=training.split,
        tokens=last.step * scale.batch * scale.seq_len,
        seed=training.seed,
        flags=() if rung is None else rung.entropy.flags,
        ngrams=training.ngrams if last.step == scale.num_steps else None,  # they count the tokens of the whole training
    )
    corpus, workload = known_corpus(training.corpus), Workload(prompt_len=scale.seq_len)
    pricer = load_pricer("published")
    try:
        estimate_generation(workload.graphs(candidate.architecture), pricer)
    except UnpricedOpError:
        pricer = load_pricer("semi2k")
    provenance = Provenance(
        run=folder.absolute().name,
        created=training.created,
        command=training.command,
        corpus=training.corpus,
        data=None if corpus is None else corpus.data,
        versions=training.versions,
        cost_model_id=pricer.cost_model_id,
    )
    tokenizer = training_tokenizer(folder, training.corpus)
    export = _prepared(candidate, last, pricer, workload, result, provenance, tokenizer, fold=fold)
    from_scratch = not {"--init-from", "--parent"}.intersection(training.command)
    return replace(export, windows=_windows(training.corpus, [] if from_scratch else [None]))


def _windows(corpus: str, parents: list[KeptWindows | None]) -> KeptWindows | None:
    """Return the windows of a cached corpus' training text and of the parents'; None if any is unknown."""
    known = known_corpus(corpus)
    parts = [None if known is None else trained_on(Path(known.folder)), *parents]
    of_text = [part for part in parts if part is not None]
    return np.unique(np.concatenate(of_text)) if len(of_text) == len(parts) else None


def _prepared(
    candidate: Candidate,
    last: Checkpoint,
    pricer: Pricer,
    workload: Workload,
    result: Result,
    provenance: Provenance,
    tokenizer: Path,
    *,
    fold: bool,
) -> Export:
    corpus = known_corpus(provenance.corpus)
    kind, tokens = check_tokens(corpus, candidate.trained.vocab_size, candidate.recipe.scale.seq_len)
    trained, weights, left = deployable(candidate, last, bounding_tokens(corpus, tokens))
    architecture, folding = at_dimensions(trained, candidate.architecture) if left else candidate.architecture, None
    if fold:
        form = fold_as_far_as(trained, weights, tokens, pricer.protocol)
        trained, weights = form.folded.architecture, form.folded.weights
        architecture = at_dimensions(trained, architecture)
        folding = Fold(
            check=asdict(form.check),
            passes=form.check.passes,
            tokens=kind,
            condition=form.folded.condition,
            left=left + form.folded.left,
        )
    facts = Facts(
        candidate=candidate,
        architecture=architecture,
        result=result,
        estimate=_per_token(estimate_generation(workload.graphs(architecture), pricer).whole, workload.new_tokens),
        workload=workload,
        provenance=provenance,
        fold=folding,
    )
    return Export(
        trained=trained,
        weights=weights,
        facts=facts,
        tokenizer=tokenizer,
        fixed_point=recorded(trained, {name: value.double().numpy() for name, value in weights.items()}, corpus),
    )


def _per_token(whole: Estimate, num_tokens: int) -> Estimate:
    """Return the average over the new tokens, with the ops of all of them."""
    bounds = whole.latency_s_range
    return replace(
        whole,
        total=shared_price(whole.total, num_tokens),
        latency_s_range=None if bounds is None else (bounds[0] / num_tokens, bounds[1] / num_tokens),
        by_layer=tuple((layer, shared_price(price, num_tokens)) for layer, price in whole.by_layer),
    )
