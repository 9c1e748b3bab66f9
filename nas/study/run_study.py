"""One study from prepared data to a finished run folder: what `nas.search` does once it knows that something fits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rich.console import Console

from costmodel.config.bugs import bugs_reported
from costmodel.errors import StoppedError
from nas.attention.causal import has_native
from nas.blocks.halves import BlockScores
from nas.conversion.parent import NO_PARENT, keep_parent
from nas.corpus.corpus import Corpus, prepare
from nas.recipe.recipe import SCALES
from nas.report.plot_files import plot_front, remove_plots
from nas.report.price_lines import price_line
from nas.report.progress import Eta, shown
from nas.report.summary import closing_lines
from nas.results import ledger
from nas.results.front import Summary, front, num_planned, summarise
from nas.results.ledger import Record
from nas.results.tables import write_tables
from nas.storage import locked
from nas.study.blocks import study_blocks
from nas.study.config import THREADS_PER_TRIAL, StudyConfig
from nas.study.fleet.nodes import Node
from nas.study.fleet.ray_cluster import RunHaltedError, cluster_nodes
from nas.study.fleet.resources import Resources, resolved, resource_lines, study_resources, this_machine
from nas.study.open_run import checked_meta, new_meta, open_trials
from nas.study.parent import run_parent, study_parent
from nas.study.ray_tune import run_study
from nas.study.run_folder import PARENT_FOLDER, Meta, new_folder, read_ledger, read_meta, write_config, write_meta
from nas.study.run_report import write_report
from nas.study.trials import Trials
from nas.study.warm_start import begin_with, read_warm_start
from nas.study.worker import worker_env
from search_spaces.budget.feasible import FeasibleSpace

FEW_TOKENS = 1 << 23  # proxies from scratch pass the trigram between 2 and 6 million tokens, the 5-gram later


class Listener(Protocol):
    """Who is told how a run goes on."""

    def started(self, folder: Path) -> None:
        """Its folder is a run, and no trial has begun in this process."""

    def trial_ended(self, record: Record) -> None:
        """The record is in the ledger."""


def run_campaign(
    config: StudyConfig,
    feasible: FeasibleSpace,
    console: Console,
    *,
    folder: Path | None,
    output_dir: Path | None,
    listener: Listener,
) -> Path:
    """Trains candidates until the schedule is finished, then writes tables, front and plots and says what came out.

    folder: the run to resume, or None for a new one in `output_dir`. Returns the run's folder.
    Raises UserError for bad input, StoppedError or OSError if the run cannot go on (it can be resumed).
    """

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False)

    resources = study_resources(config, _nodes(config.ray_address))
    config = resolved(config, resources)
    for line in resource_lines(config, resources):
        tell(line)
    base = feasible.space.base
    parent = study_parent(config, base) if folder is None else run_parent(folder, read_meta(folder))
    corpus = prepare(
        config.data,
        vocab_size=SCALES[config.scale].vocab_size or base.vocab_size,
        seq_len=config.seq_len,
        tokenizer=parent and parent.model.tokenizer,
        tokens=config.tokens or SCALES[config.scale].tokens,
        tell=tell,
    )
    if not config.gpus_per_trial:
        has_native(SCALES[config.scale].head_dim or feasible.space.base.head_dim)  # compiled or said here, once for all
    if folder is None:
        config = replace(config, parent=NO_PARENT if parent is None else parent.name)
        meta = new_meta(config, feasible, corpus, parent, tell)
        warm = read_warm_start(config, feasible, meta)
        config = replace(config, warm_start=None if warm is None else str(warm.folder))
        tell(start_line(meta))
        if warm is not None:
            tell(f"begins with {warm.num_trials} trials of {warm.folder}")
        folder = new_folder(output_dir)
        if parent is not None:
            keep_parent(parent, folder / PARENT_FOLDER)
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
        _study(config, feasible, corpus, meta, resources, folder, console, blocks, listener)
    return folder


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
    try:
        return cluster_nodes(address)
    except RunHaltedError as error:
        raise StoppedError(f"{error}; start it, or give another --ray-address or none") from error


def _study(
    config: StudyConfig,
    feasible: FeasibleSpace,
    corpus: Corpus,
    meta: Meta,
    resources: Resources,
    folder: Path,
    console: Console,
    blocks: BlockScores | None,
    listener: Listener,
) -> None:
    trials = open_trials(config, feasible, corpus, meta, folder, blocks=blocks, on_end=listener.trial_ended)
    listener.started(folder)
    console.print(
        f"run {folder}: {config.num_trials} candidates and {_num_baselines(trials)} baselines, "
        f"then {config.finalist_seeds} more seeds for each member of the front",
        soft_wrap=True,
        highlight=False,
    )
    try:
        _train(trials, config, resources, meta, console)
    finally:
        # of what is on disk: an interrupt may come between a write and its note
        write_tables(folder, read_ledger(folder), config.budget, feasible.space.base, meta.ngrams)
    unfinished = f"time budget used up; go on with --resume {folder}" if trials.running or not trials.finished else ""
    if not ledger.completed(trials.records):
        report_line(folder)
        reason = unfinished or f"see the reasons in {folder / 'trials.csv'}"
        raise StoppedError(f"no trial was trained to completion: {reason}.")
    lines = _closing(trials, config, feasible, meta, folder)
    if unfinished:
        lines.append(unfinished)
    lines.append(report_line(folder))
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _closing(trials: Trials, config: StudyConfig, feasible: FeasibleSpace, meta: Meta, folder: Path) -> list[str]:
    """Draws the front and says what came out."""
    remove_plots(folder)
    records, num_layers = trials.records, feasible.space.base.num_layers
    plots = plot_front(
        folder,
        records,
        config.budget,
        num_layers=num_layers,
        seq_len=config.seq_len,
        ngrams=meta.ngrams,
        parent=meta.parent,
    )
    lines = closing_lines(
        records,
        config.budget,
        num_layers=num_layers,
        seq_len=config.seq_len,
        folder=folder,
        plots=plots,
        ngrams=meta.ngrams,
        parent=meta.parent,
    )
    found = front(records, config.budget)
    lines.append(price_line(found, feasible.space.base, config.protocol, config.workload))
    if (remark := trials.schedule.strategy.remark(trials.schedule.trained())) is not None:
        lines.append(remark)
    return lines


def report_line(folder: Path) -> str:
    """Writes the page of a run and says where it is, or why there is none: what was trained is worth more than it."""
    try:
        return f"report: {write_report(folder)}"
    except Exception as error:
        return f"note: no report was written ({error}); try python -m nas.report {folder}"


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


def _train(trials: Trials, config: StudyConfig, resources: Resources, meta: Meta, console: Console) -> None:
    total = num_planned(trials.records, config.num_trials)
    eta = Eta(already_ended=len(ledger.finished(trials.records)))

    def state() -> tuple[Summary, int]:
        return summarise(trials.records, config.budget, meta.reference, finalist_seeds=config.finalist_seeds), total

    def tell(line: str) -> None:
        console.print(line, soft_wrap=True, highlight=False)

    with shown(console, state, eta, meta.ngrams) as refresh:
        run_study(
            trials,
            resources,
            worker_env=worker_env(THREADS_PER_TRIAL),
            time_budget_s=config.time_budget_s,
            on_change=refresh,
            tell=tell,
        )


def _num_baselines(trials: Trials) -> int:
    return sum(one.role == "baseline" for one in trials.schedule.proposals)
