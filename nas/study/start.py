"""The start of a study: what it trains on and from, its folder, and its trials with the ledger replayed."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from costmodel.errors import StoppedError, UserError
from costmodel.ops import SoftmaxForm
from nas.attention.causal import has_native
from nas.conversion.parent import BUILTIN, NO_PARENT, Parent, keep_parent
from nas.conversion.score_bounds import bounding_tokens, unheld_by_parent
from nas.conversion.verified_fold import LOG_SUMS, check_tokens
from nas.corpus.corpus import Corpus, prepare
from nas.corpus.ngrams import TRIGRAM
from nas.corpus.second import DEPENDENCIES, require_sequences, second_corpus, second_source
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import SCALES
from nas.run import ledger
from nas.run.config import THREADS_PER_TRIAL, StudyConfig, study_recipe
from nas.run.folder import PARENT_FOLDER, Meta, SecondCorpus, new_folder, read_meta, write_config, write_meta
from nas.run.ledger import Record
from nas.study.blocks import study_blocks
from nas.study.nodes import Node
from nas.study.open_run import checked_meta, new_meta, open_trials, require_knowledge
from nas.study.parent import run_parent, study_parent
from nas.study.priced_study import overview
from nas.study.resources import Resources, resolved, resource_lines, study_resources, this_machine
from nas.study.trials import RunHaltedError, Trials
from nas.study.warm_start import WarmStart, begin_with, read_warm_start
from nas.training.memory import available_bytes, require_memory, training_memory
from search_spaces.budget.feasible import FeasibleSpace, check_feasible, priced_anew
from search_spaces.definition import Withheld
from search_spaces.space import without

NO_SECOND = "none"
FEW_TOKENS = 1 << 23  # proxies from scratch pass the trigram between 2 and 6 million tokens, the 5-gram later


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StartedStudy:
    """A study that is about to train. config: resolved. feasible: as the parent allows.

    warm: what another run gives to its ledger, if that is new.
    """

    folder: Path
    config: StudyConfig
    feasible: FeasibleSpace
    meta: Meta
    resources: Resources
    parent: Parent | None
    corpus: Corpus
    second: Corpus | None
    warm: WarmStart | None


def start_study(
    config: StudyConfig,
    feasible: FeasibleSpace,
    log: Callable[[str], None],
    *,
    folder: Path | None,
    output_dir: Path | None,
) -> StartedStudy:
    """Finds what a study trains on and from, and makes the folder of a new one.

    Raises UserError for bad input, StoppedError if the cluster cannot be reached.
    """
    resources = study_resources(config, _nodes(config.ray_address))
    config = resolved(config, resources)
    for line in resource_lines(config, resources):
        log(line)
    base, scale = feasible.space.base, SCALES[config.scale]
    parent = study_parent(config, base) if folder is None else run_parent(folder, read_meta(folder))
    corpus = prepare(
        config.data,
        vocab_size=scale.vocab_size or base.vocab_size,
        seq_len=config.seq_len,
        tokenizer=parent and parent.model.tokenizer,
        of_parent=parent and parent.model.windows,
        tokens=config.tokens or scale.tokens,
        log=log,
    )
    if not config.gpus_per_trial:
        has_native(scale.head_dim or base.head_dim)  # compiled or said here, once for all
    if folder is None:
        second = study_second(config, corpus, parent)
        feasible = feasible if parent is None else _held(feasible, parent, corpus, log)
        config = replace(config, also_validate=NO_SECOND if second is None else second.data)
        with _threads(THREADS_PER_TRIAL):
            folder, config, meta, warm = _new_run(config, feasible, corpus, second, parent, resources, output_dir, log)
    else:
        meta = checked_meta(folder, config, feasible, corpus)
        second = run_second(folder, meta, config, corpus, parent)
        warm = None if (folder / ledger.FILE_NAME).exists() else read_warm_start(config, feasible, meta)
    return StartedStudy(
        folder=folder,
        config=config,
        feasible=feasible,
        meta=meta,
        resources=resources,
        parent=parent,
        corpus=corpus,
        second=second,
        warm=warm,
    )


def start_trials(started: StartedStudy, console: Console, on_end: Callable[[Record], None]) -> Trials:
    """Makes the folder a run and its ledger trials. on_end: as `Trials` has it."""
    folder, config, corpus, feasible = started.folder, started.config, started.corpus, started.feasible
    write_meta(folder, started.meta)
    write_config(folder, config)
    if started.warm is not None:
        begin_with(started.warm, folder, config)
    recipe = started.meta.recipe
    with _threads(THREADS_PER_TRIAL):
        blocks = study_blocks(config, feasible, started.parent, recipe, corpus, folder, console, _device(config))
    return open_trials(
        config, feasible, corpus, started.meta, folder, blocks=blocks, second=started.second, on_end=on_end
    )


def study_second(config: StudyConfig, corpus: Corpus, parent: Parent | None) -> Corpus | None:
    """The second corpus that a new study asks for, or None.

    Unless one is named, DEPENDENCIES beside the builtin parent's own corpus. Raises UserError if the one named is not
    there, is the first one's text, or is too small.
    """
    usual = DEPENDENCIES if parent is not None and parent.name == BUILTIN and config.data == "stdlib" else NO_SECOND
    if (data := config.also_validate or usual) == NO_SECOND:
        return None
    second = second_corpus(data, second_source(data), corpus, parent and parent.model.windows)
    require_sequences(second, config.seq_len)
    return second


def run_second(folder: Path, meta: Meta, config: StudyConfig, corpus: Corpus, parent: Parent | None) -> Corpus | None:
    """The second corpus of a run to resume. Raises UserError if it is not what it was."""
    if meta.second is None:
        return None
    second = study_second(config, corpus, parent)
    if second is None or second.fingerprint != meta.second.fingerprint:
        raise UserError(
            f"the second corpus of {folder}, {meta.second.data}, must be the one it was validated on, but its text has "
            f"changed; restore it, or start a new run."
        )
    return second


WITHHELD = {"bounded": "bounded softmax", "power8": "eighth powers"}  # in words


def _held(feasible: FeasibleSpace, parent: Parent, corpus: Corpus, log: Callable[[str], None]) -> FeasibleSpace:
    """The space without bounded softmaxes and eighth powers where they would not hold with scores as the parent's.

    Raises InfeasibleError if nothing is left within the budget.
    """
    space, priced = feasible.space, feasible.priced
    offered = {layer.attention for layer in space.layers}
    forms: list[SoftmaxForm] = [form for form in LOG_SUMS if form in offered]
    if not forms:
        return feasible
    _, checked = check_tokens(corpus, parent.model.architecture.vocab_size, priced.seq_len)
    tokens = bounding_tokens(corpus, checked)
    withheld = Withheld(**{form: unheld_by_parent(parent, form, tokens) for form in forms})
    if (narrowed := without(space, withheld)) is space:
        return feasible
    for form, layers in asdict(narrowed.definition.withheld).items():
        if layers:
            log(
                f"no {WITHHELD[form]} in layers {', '.join(map(str, layers))} (from 0), where rows of the parent's "
                f"scores are too far apart"
            )
    feasible = priced_anew(feasible, narrowed, priced.workload)
    check_feasible(feasible)
    log(overview(feasible)[0])
    return feasible


def _new_run(
    config: StudyConfig,
    feasible: FeasibleSpace,
    corpus: Corpus,
    second: Corpus | None,
    parent: Parent | None,
    resources: Resources,
    output_dir: Path | None,
    log: Callable[[str], None],
) -> tuple[Path, StudyConfig, Meta, WarmStart | None]:
    """The folder of a new run with its parent, its configuration and meta, and the run that it begins with."""
    config = replace(config, parent=NO_PARENT if parent is None else parent.name)
    recipe = study_recipe(config, parent and parent.route)
    _check_memory(Candidate(architecture=feasible.space.base, recipe=recipe), config, resources, log)
    require_knowledge(config, parent, recipe)
    meta = new_meta(config, feasible, corpus, second, parent, log, _device(config))
    warm = read_warm_start(config, feasible, meta)
    for line in (start_line(meta), *(() if parent is None else parent.model.notes)):
        log(line)
    log(validation_line(corpus, parent))
    if meta.second is not None:
        log(second_line(meta.second))
    if warm is not None:
        config = replace(config, warm_start=str(warm.folder))
        log(f"begins with {warm.num_trials} trials of {warm.folder}")
    folder = new_folder(output_dir)
    if parent is not None:
        keep_parent(parent, folder / PARENT_FOLDER)
    return folder, config, meta, warm


def _device(config: StudyConfig) -> str:
    """Where this process scores and validates the parent: as trials are trained, if it can."""
    return "cuda" if config.gpus_per_trial and torch.cuda.is_available() else "cpu"


def _check_memory(candidate: Candidate, config: StudyConfig, resources: Resources, log: Callable[[str], None]) -> None:
    """Says what a trial takes that has all of the space's base. Raises UserError if this machine does not hold those
    that run at a time; of a cluster's nodes nothing is known.
    """
    memory, device = training_memory(candidate), _device(config)
    log(f"{memory.line}, each trial at most about that")
    if resources.ray_address is None:
        on_one = int(1 / resources.gpus_per_trial) if device == "cuda" else resources.at_a_time
        require_memory(memory, available_bytes(device), on_one)


@contextmanager
def _threads(num: int) -> Iterator[None]:
    """Gives torch so many threads, so that what a search begins with is the same on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _nodes(address: str | None) -> tuple[Node, ...]:
    """The nodes to train on. Raises StoppedError if the cluster cannot be reached."""
    if address is None:
        return (this_machine(),)
    from nas.study.ray_cluster import cluster_nodes  # Ray, which a study without a cluster waits for later

    try:
        return cluster_nodes(address)
    except RunHaltedError as error:
        raise StoppedError(f"{error}; start it, or give another --ray-address or none") from error


def validation_line(corpus: Corpus, parent: Parent | None) -> str:
    """Says what validates, what does not as it was trained on, and of whose text nothing is known."""
    held_out = corpus.held_out
    line = f"validation: {corpus.num_validation_tokens:,} tokens of {len(held_out.documents)} documents"
    if held_out.num_left_out:
        line += f", {held_out.num_left_out} ({held_out.tokens_left_out:,} tokens) left out as copies of training text"
    line += f"; {held_out.repeated_share:.1%} of their windows of five lines were trained on"
    if parent is not None and parent.model.windows is None:
        line += f", not counting what parent {parent.name} was, of which nothing is known"
    return line


def second_line(second: SecondCorpus) -> str:
    """Says what completed trials are validated on too."""
    num_tokens = sum(size for _, size in second.held_out.documents)
    return (
        f"completed trials are validated on {second.data} too, {num_tokens:,} tokens of other text (fingerprint "
        f"{second.fingerprint}): the trigram {second.ngrams.perplexity(TRIGRAM):.2f}"
        + ("" if second.parent_loss is None else f", the parent {math.exp(second.parent_loss):.2f}")
    )


def start_line(meta: Meta) -> str:
    """Says where candidates start from; from scratch on few tokens, what that is good for."""
    if meta.parent is not None:
        return (
            f"candidates start from parent {meta.parent.name}, {meta.parent.notation}, perplexity "
            f"{meta.parent.perplexity:.2f} on the tokens that validate them"
        )
    tokens = meta.recipe.scale.tokens
    if tokens >= FEW_TOKENS:
        return f"candidates are trained from scratch on {tokens:,} tokens"
    return (
        f"note: from scratch on {tokens:,} tokens candidates are likely to know less than a trigram, so their order "
        f"says little; start from a trained model (--parent) or give --tokens {FEW_TOKENS} or more"
    )
