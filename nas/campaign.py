"""One study from prepared data to a finished run folder: what `nas.search` does once it knows that something fits."""

import os
import platform
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from costmodel.cli import StoppedError
from costmodel.cost import Budget
from costmodel.estimate import Pricer
from costmodel.published_rows import published_rows
from nas import ledger
from nas.closing import closing_lines
from nas.config import SCALES
from nas.data import Corpus, prepare
from nas.front import Summary, front, summarise
from nas.ledger import Record
from nas.plot import plot_run
from nas.progress import Eta, shown
from nas.run import Meta, StudyConfig, locked, new_folder, read_meta, write_config, write_meta
from nas.searcher import SEARCHERS, Schedule
from nas.study import Resources, run_study
from nas.trials import Setting, Trials
from nas.worker import worker_env
from search_spaces.architecture import Architecture, dump_architecture
from search_spaces.feasible import FeasibleSpace
from search_spaces.notation import Named, parse
from search_spaces.space import SearchSpace, contains, num_members

VERSIONED = ("private-inference-nas", "torch", "ray", "tokenizers", "numpy")


def run_campaign(
    config: StudyConfig,
    feasible: FeasibleSpace,
    pricer: Pricer,
    console: Console,
    *,
    folder: Path | None,
    output_dir: Path | None,
) -> None:
    """Trains candidates until the schedule is finished, then writes tables, front and plots and says what came out.

    folder: the run to resume, or None for a new one in `output_dir`.
    Raises ValueError for bad input, StoppedError or OSError if the run cannot go on (it can be resumed).
    """
    resources = study_resources(config)
    corpus = prepare(config.data, vocab_size=SCALES[config.scale].vocab_size or feasible.space.base.vocab_size)
    known = None if folder is None else _checked_meta(folder, pricer, corpus)
    folder = folder or new_folder(output_dir)
    with locked(folder):
        meta = known or _new_meta(config, feasible, pricer, corpus)
        write_config(folder, config)
        write_meta(folder, meta)
        trials = _trials(config, feasible, pricer, corpus, resources, meta, folder)
        try:
            _train(trials, config, resources, meta, console)
        finally:
            write_tables(folder, trials.records, config.budget, feasible.space.base)
        if not ledger.completed(trials.records):
            raise StoppedError(f"no trial was trained to completion; see the reasons in {folder / 'trials.csv'}.")
        plots = plot_run(folder)
        for line in closing_lines(trials.records, config, feasible.space.base.num_layers, folder, plots):
            console.print(line, soft_wrap=True, highlight=False)


def study_resources(config: StudyConfig) -> Resources:
    """One trial per core by default, threads so that cores are never oversubscribed; GPUs bound it where used."""
    cores = len(os.sched_getaffinity(0))
    concurrent = cores
    if config.gpus_per_trial > 0 and config.ray_address is None:
        if not torch.cuda.is_available():
            raise ValueError(f"--gpus-per-trial {config.gpus_per_trial} needs a CUDA device, but there is none.")
        concurrent = max(1, int(torch.cuda.device_count() / config.gpus_per_trial))
    concurrent = config.max_concurrent or concurrent
    return Resources(
        max_concurrent=concurrent if config.ray_address else min(concurrent, cores),
        threads_per_trial=max(1, cores // concurrent),
        gpus_per_trial=config.gpus_per_trial,
        ray_address=config.ray_address,
    )


def published_members(space: SearchSpace) -> tuple[Named, ...]:
    """The papers' rows of this depth that the space holds, in the papers' order, each once."""
    notations = [row.notation for row in published_rows() if row.num_layers == space.base.num_layers]
    members = [parse(notation, space.base) for notation in dict.fromkeys(notations)]
    return tuple(member for member in members if contains(space, member))


def write_tables(folder: Path, records: Sequence[Record], budget: Budget, base: Architecture) -> None:
    """`trials.csv`, `pareto.csv` and the architectures of the front, all derived from the ledger."""
    members = front(records, budget)
    ledger.write_csv(folder / "trials.csv", ledger.finished(records))
    ledger.write_csv(folder / "pareto.csv", members)
    architectures = folder / "architectures"
    shutil.rmtree(architectures, ignore_errors=True)
    architectures.mkdir()
    for member in members:
        text = dump_architecture(parse(member.notation, base).architecture)
        (architectures / f"{member.arch_id}.yaml").write_text(text)


def _train(trials: Trials, config: StudyConfig, resources: Resources, meta: Meta, console: Console) -> None:
    total = config.num_trials + sum(one.role == "baseline" for one in trials.schedule.proposals)
    eta = Eta(already_ended=len(ledger.finished(trials.records)))

    def state() -> tuple[Summary, int]:
        return summarise(trials.records, config.budget, meta.reference), total

    with shown(console, state, eta) as refresh:
        run_study(
            trials,
            resources,
            worker_env=worker_env(resources.threads_per_trial),
            time_budget_s=config.time_budget_s,
            on_change=refresh,
        )


def _trials(
    config: StudyConfig,
    feasible: FeasibleSpace,
    pricer: Pricer,
    corpus: Corpus,
    resources: Resources,
    meta: Meta,
    folder: Path,
) -> Trials:
    published = published_members(feasible.space)
    schedule = Schedule(
        strategy=SEARCHERS[config.searcher](feasible, [member for member in published if feasible.fits(member)]),
        seed=config.seed,
        num_trials=config.num_trials,
        baselines=[member for member in published if not feasible.fits(member) and _has_norm(member)],
    )
    setting = Setting(
        config=config,
        folder=folder,
        corpus=corpus,
        device="cuda" if config.gpus_per_trial > 0 else "cpu",
        threads=resources.threads_per_trial,
        versions=meta.versions,
    )
    path = folder / ledger.FILE_NAME
    return Trials(schedule, pricer, setting, ledger.recover(path) if path.exists() else ())


def _has_norm(member: Named) -> bool:
    return member.architecture.final_norm != "none"


def _new_meta(config: StudyConfig, feasible: FeasibleSpace, pricer: Pricer, corpus: Corpus) -> Meta:
    assert config.budget.latency_s is not None
    return Meta(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: version(name) for name in VERSIONED} | {"python": platform.python_version()},
        hardware={"machine": platform.machine(), "cores": str(len(os.sched_getaffinity(0)))},
        cost_model_id=pricer.cost_model_id,
        corpus=corpus.fingerprint,
        tokenizer=corpus.tokenizer,
        split=corpus.split,
        vocab_size=corpus.vocab_size,
        reference=(config.budget.latency_s, corpus.unigram_loss),
        num_members=num_members(feasible.space),
        num_feasible=feasible.num_feasible,
    )


def _checked_meta(folder: Path, pricer: Pricer, corpus: Corpus) -> Meta:
    """The meta of a run to resume. Raises ValueError if prices or data are no longer those it was made with."""
    meta = read_meta(folder)
    for name, found in (("cost_model_id", pricer.cost_model_id), ("corpus", corpus.fingerprint)):
        if getattr(meta, name) != found:
            raise ValueError(
                f"`{name}` of {folder} must be the present one, {found}, but is {getattr(meta, name)}; "
                f"results of different {name} are never mixed: start a new run."
            )
    return meta
