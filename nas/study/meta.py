"""Makes the `Meta` of a new run, the facts recorded beside its configuration, and checks it when a run is resumed."""

import math
import os
import platform
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN, Parent
from nas.corpus.corpus import Corpus
from nas.corpus.documents import OWN_RULE, Reading
from nas.corpus.ngrams import TRIGRAM, ngram_baseline
from nas.corpus.tokenizer import begin_line
from nas.provenance import versions
from nas.recipe.distillation import parent_architecture
from nas.recipe.recipe import Scale
from nas.run.config import StudyConfig, study_recipe
from nas.run.folder import Meta, ParentResult, SecondCorpus
from nas.run.run import Run
from nas.searchers.surrogate import priors_of
from nas.training.batches import validate
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import price_architecture
from search_spaces.notation import name_of
from search_spaces.space import num_members

FEW_TOKENS = 1 << 23  # from scratch, candidates beat the trigram baseline after 2 to 6 million tokens, the 5-gram later


def new_meta(
    config: StudyConfig,
    feasible: FeasibleSpace,
    corpus: Corpus,
    second: Corpus | None,
    parent: Parent | None,
    device: str = "cpu",
    read: tuple[Reading, ...] = (),
) -> Meta:
    """Return the `Meta` of a new run.

    second: the second corpus, or None. parent: None from scratch. device: where the parent is validated. read: which
    files of `--data`'s folders were read. Raises UserError if a split of a corpus has no sequence.

    N-gram baselines count the training tokens of a candidate or, with a parent, the whole training split, since the
    parent may have seen all of it; in both cases at most 2**24 tokens. Text that only the parent has seen is not
    counted.
    """
    assert config.budget.latency_s is not None
    recipe = study_recipe(config, parent and parent.distillation)
    scale = recipe.scale
    ngrams = partial(
        ngram_baseline,
        corpus,
        seq_len=scale.seq_len,
        validation_tokens=scale.validation_tokens,
        tokens=scale.seen_tokens if parent is None else None,
        seed=config.seed,
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
        begin_of_text=None if corpus.begin_of_text is None else corpus.begin_of_text.token,
        reference=(config.budget.latency_s, corpus.unigram_loss),
        num_members=num_members(feasible.space),
        num_feasible=feasible.num_feasible,
        base=feasible.space.base,
        recipe=recipe,
        withheld=feasible.space.definition.withheld,
        prior=priors_of(short_finetune=config.short_finetune)._asdict() if config.searcher == "trellis" else {},
        held_out=corpus.held_out,
        read=read,
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


def parent_result(
    parent: Parent, corpus: Corpus, scale: Scale, feasible: FeasibleSpace, device: str = "cpu"
) -> ParentResult:
    """Return the parent's loss on the candidates' validation tokens, and its cost in the dimensions of the space."""
    priced = feasible.priced
    architecture = parent_architecture(parent.distillation, priced.space.base)
    cost = price_architecture(architecture, priced.pricer, priced.workload, priced.cost_of)
    validation = validate(parent.decoder().to(device), corpus, scale)
    return ParentResult(
        name=parent.name,
        notation=name_of(architecture),
        val_loss=validation.loss,
        latency_s=cost.price.latency_s,
        documents=validation.documents,
    )


def checked_meta(run: Run, config: StudyConfig, feasible: FeasibleSpace, corpus: Corpus) -> Meta:
    """Return the `Meta` of a run to resume, with the reference point and number of members of the present budget.

    Raises UserError if the cost model, corpus or tokenizer differs from that of the run.
    """
    present = {"cost_model_id": _cost_model_ids(feasible), "corpus": corpus.fingerprint, "tokenizer": corpus.tokenizer}
    for name, value in present.items():
        if getattr(run.meta, name) != value:
            raise UserError(
                f"`{name}` of {run.folder} must be the present one, {value}, but is {getattr(run.meta, name)}; "
                f"results of different {name} are never mixed: start a new run."
            )
    assert config.budget.latency_s is not None
    reference = config.budget.latency_s, run.meta.reference[1]
    return replace(run.meta, reference=reference, num_feasible=feasible.num_feasible)


def _cost_model_ids(feasible: FeasibleSpace) -> str:
    return ", ".join(constraint.priced.pricer.cost_model_id for constraint in feasible.every)


def opening_lines(meta: Meta, corpus: Corpus, parent: Parent | None, begin_of_text: str = OWN_RULE) -> list[str]:
    """Return lines on what the candidates of a new run start from, and on which text they are validated.

    begin_of_text: the value of --begin-of-text. The line on validation says how much text was left out as copies of
    training text, and whether the parent's training text is unknown.
    """
    held_out, lines = corpus.held_out, [start_line(meta), *(() if parent is None else parent.model.notes)]
    validation = f"validation: {corpus.num_validation_tokens:,} tokens of {len(held_out.documents)} documents"
    if held_out.num_left_out:
        left_out = f"{held_out.num_left_out} ({held_out.tokens_left_out:,} tokens)"
        validation += f", {left_out} left out as copies of training text"
    validation += f"; {held_out.repeated_share:.1%} of their windows of five lines were trained on"
    if parent is not None and parent.model.windows is None:
        validation += f", not counting what parent {parent.name} was, of which nothing is known"
    lines.append(validation)
    if corpus.begin_of_text is not None or (parent is not None and parent.name != BUILTIN):
        lines.append(begin_line(corpus.begin_of_text, begin_of_text))
    lines += [f"warning: {meta.weak_parent}"] if meta.weak_parent else []
    if (second := meta.second) is not None:
        num_tokens = sum(size for _, size in second.held_out.documents)
        lines.append(
            f"completed trials are validated on {second.data} too, {num_tokens:,} tokens of other text (fingerprint "
            f"{second.fingerprint}): the trigram {second.ngrams.perplexity(TRIGRAM):.2f}"
            + ("" if second.parent_loss is None else f", the parent {math.exp(second.parent_loss):.2f}")
        )
    return lines


def start_line(meta: Meta) -> str:
    """Return a line on what candidates start from, with a note if they train from scratch on few tokens."""
    if meta.parent is not None:
        return (
            f"candidates start from parent {meta.parent.name}, {meta.parent.notation}, perplexity "
            f"{meta.parent.perplexity:.2f} on the tokens that validate them"
        )
    tokens = meta.recipe.scale.tokens
    if tokens >= FEW_TOKENS:
        return f"candidates are trained from scratch on {tokens:,} tokens"
    return (
        f"note: from scratch on {tokens:,} tokens candidates are likely to be worse than a trigram model, so their "
        f"order says little; start from a trained model (--parent) or give --tokens {FEW_TOKENS} or more"
    )
