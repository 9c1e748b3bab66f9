"""One study from prepared data to a finished run folder: what `nas.search` does once it knows that something fits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console

from costmodel.config.bugs import bugs_reported
from costmodel.errors import StoppedError
from nas.attention.causal import has_native
from nas.conversion.parent import NO_PARENT, Parent, keep_parent
from nas.corpus.corpus import Corpus, prepare
from nas.recipe.recipe import SCALES
from nas.report.progress import shown
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.folder import PARENT_FOLDER, Meta, new_folder, read_ledger, read_meta, write_config, write_meta
from nas.run.ledger import Record
from nas.run.run import Run
from nas.run.tables import write_tables
from nas.storage import locked
from nas.study.blocks import study_blocks
from nas.study.nodes import Node
from nas.study.open_run import checked_meta, new_meta, open_trials
from nas.study.parent import run_parent, study_parent
from nas.study.resources import Resources, resolved, resource_lines, study_resources, this_machine
from nas.study.trials import RunHaltedError, Trials
from nas.study.warm_start import WarmStart, begin_with, read_warm_start
from search_spaces.budget.feasible import FeasibleSpace

FEW_TOKENS = 1 << 23  # proxies from scratch pass the trigram between 2 and 6 million tokens, the 5-gram later


class Listener(Protocol):
    """Who is told how a run goes on."""

    def started(self, folder: Path) -> None:
        """Its folder is a run, and no trial has begun in this process."""

    def trial_ended(self, record: Record) -> None:
        """The record is in the ledger."""


def run_study(
    config: StudyConfig,
    feasible: FeasibleSpace,
    console: Console,
    *,
    folder: Path | None,
    output_dir: Path | None,
    listener: Listener,
) -> Path:
    """Trains candidates until the schedule is finished, then writes tables, front and plots and logs what came out.

    folder: the run to resume, or None for a new one in `output_dir`. Returns the run's folder.
    Raises UserError for bad input, StoppedError or OSError if the run cannot go on (it can be resumed).
    """
    log = partial(console.print, soft_wrap=True, highlight=False)
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
        tokens=config.tokens or scale.tokens,
        tell=log,
    )
    if not config.gpus_per_trial:
        has_native(scale.head_dim or base.head_dim)  # compiled or said here, once for all
    if folder is None:
        folder, config, meta, warm = _new_run(config, feasible, corpus, parent, output_dir, log)
    else:
        meta = checked_meta(folder, config, feasible, corpus)
        warm = None if (folder / ledger.FILE_NAME).exists() else read_warm_start(config, feasible, meta)
    saved = f"what was trained is saved; continue with --resume {folder}"
    with locked(folder), bugs_reported(folder, saved), _resumable(folder, console):
        write_meta(folder, meta)
        write_config(folder, config)
        if warm is not None:
            begin_with(warm, folder, config)
        blocks = study_blocks(config, feasible, parent, corpus, folder, console)
        trials = open_trials(config, feasible, corpus, meta, folder, blocks=blocks, on_end=listener.trial_ended)
        listener.started(folder)
        run = Run(folder=folder, config=config, meta=meta, records=tuple(trials.records))
        try:
            _train(trials, run, resources, console)
        finally:
            # of what is on disk: an interrupt may come between a write and its note
            write_tables(replace(run, records=read_ledger(folder)))
        from nas.study.closing import closing  # matplotlib and jinja2: a second, before the end for nothing

        for line in closing(trials, replace(run, records=tuple(trials.records))):
            log(line)
    return folder


def _new_run(
    config: StudyConfig,
    feasible: FeasibleSpace,
    corpus: Corpus,
    parent: Parent | None,
    output_dir: Path | None,
    log: Callable[[str], None],
) -> tuple[Path, StudyConfig, Meta, WarmStart | None]:
    """The folder of a new run with its parent, its configuration and meta, and the run that it begins with."""
    config = replace(config, parent=NO_PARENT if parent is None else parent.name)
    meta = new_meta(config, feasible, corpus, parent, log)
    warm = read_warm_start(config, feasible, meta)
    log(start_line(meta))
    if warm is not None:
        config = replace(config, warm_start=str(warm.folder))
        log(f"begins with {warm.num_trials} trials of {warm.folder}")
    folder = new_folder(output_dir)
    if parent is not None:
        keep_parent(parent, folder / PARENT_FOLDER)
    return folder, config, meta, warm


@contextmanager
def _resumable(folder: Path, console: Console) -> Iterator[None]:
    """Says how a run that ends in here goes on. Raises StoppedError where it cannot as things are."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"everything is saved; continue with --resume {folder}", soft_wrap=True, highlight=False)
        raise
    except RunHaltedError as error:
        raise StoppedError(f"{error}; remove the cause, then continue with --resume {folder}") from error
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise StoppedError(f"{reason}; remove the cause, then continue with --resume {folder}") from error


def _nodes(address: str | None) -> tuple[Node, ...]:
    """What there is to train on. Raises StoppedError if the cluster cannot be reached."""
    if address is None:
        return (this_machine(),)
    from nas.study.ray_cluster import cluster_nodes  # Ray: half a second, before its first trial for nothing

    try:
        return cluster_nodes(address)
    except RunHaltedError as error:
        raise StoppedError(f"{error}; start it, or give another --ray-address or none") from error


def _train(trials: Trials, run: Run, resources: Resources, console: Console) -> None:
    """Runs trials, beside a table of progress, until they are finished or the time is up."""
    from nas.study.ray_tune import run_trials  # Ray Tune: a second, before its first trial for nothing

    log = partial(console.print, soft_wrap=True, highlight=False)
    num_baselines = sum(proposal.role == "baseline" for proposal in trials.schedule.proposals)
    log(
        f"run {run.folder}: {run.config.num_trials} candidates and {num_baselines} baselines, "
        f"then {run.config.finalist_seeds} more seeds for each member of the front"
    )

    def state() -> Run:
        return replace(run, records=tuple(trials.records))

    with shown(console, state) as refresh:
        run_trials(trials, resources, time_budget_s=run.config.time_budget_s, on_change=refresh, log=log)


def start_line(meta: Meta) -> str:
    """What candidates start from; from scratch on few tokens, what that is good for."""
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
