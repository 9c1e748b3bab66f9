"""Searchers against each other: the same space, budget, seeds and trained tokens; hypervolume after every generation.

Trials run one after the other without early stopping, so that every trial that does not diverge costs the same
tokens. As many studies at a time as there are cores, one thread each.
"""

import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from costmodel.config.schema import decode
from costmodel.errors import StoppedError
from costmodel.protocols import load_pricer
from nas.corpus.corpus import prepare
from nas.recipe.recipe import SCALES, ScaleName
from nas.results import ledger
from nas.results.front import summarise
from nas.storage import RUNS, locked
from nas.study.config import StudyConfig
from nas.study.open_run import checked_meta, new_meta, open_trials
from nas.study.run_folder import CONFIG_FILE, write_config, write_meta
from nas.study.schedule import GENERATION_SIZE
from nas.study.searcher import SearcherName
from nas.study.trials import Trials
from nas.study.worker import run_trial, worker_env
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_space
from search_spaces.space import load_space

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it; `space` is a file beside it."""

    space: str
    budget_latency: str
    seq_len: int
    scale: ScaleName
    tokens: int
    num_trials: int
    seeds: tuple[int, ...]
    searchers: tuple[SearcherName, ...]


def run(name: str, data: dict[str, Any], console: Console) -> None:
    """Trains what is not trained yet and prints the table.

    Raises UserError for bad settings, StoppedError if a study cannot go on (run it again to resume).
    """
    settings = decode(Settings, data, f"experiment {name}")
    jobs = {
        (searcher, seed): RUNS / "experiments" / name / settings.scale / f"{searcher}-s{seed}"
        for searcher in settings.searchers
        for seed in settings.seeds
    }
    os.environ.update(worker_env(threads=1))
    prepare("stdlib", vocab_size=SCALES[settings.scale].vocab_size or 0)  # once, before the processes want it
    curves: dict[tuple[str, int], list[float]] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=os.cpu_count(), mp_context=spawn) as pool, Progress(console=console) as bar:
        task = bar.add_task("studies", total=len(jobs))
        futures = {pool.submit(study, settings, *key, folder): key for key, folder in jobs.items()}
        for future in as_completed(futures):
            curves[futures[future]] = future.result()
            bar.advance(task)
    for table in tables(settings, curves):
        console.print(table)


def study(settings: Settings, searcher: SearcherName, seed: int, folder: Path) -> list[float]:
    """One study in this process; hypervolume, seconds x nats, after every whole generation of candidates."""
    config = StudyConfig(
        budget_latency=settings.budget_latency,
        space=str(CONFIGS / settings.space),
        seq_len=settings.seq_len,
        searcher=searcher,
        num_trials=settings.num_trials,
        finalist_seeds=0,
        scale=settings.scale,
        tokens=settings.tokens,
        parent="none",
        seed=seed,
    )
    feasible = within_budget(price_space(load_space(config.space), load_pricer(), config.seq_len), config.budget)
    corpus = prepare(config.data, vocab_size=SCALES[config.scale].vocab_size or feasible.space.base.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        is_old = (folder / CONFIG_FILE).exists()
        pricer = feasible.priced.pricer
        meta = checked_meta(folder, config, pricer, corpus) if is_old else new_meta(config, feasible, corpus, None)
        write_meta(folder, meta)
        write_config(folder, config)
        trials = open_trials(config, feasible, corpus, meta, folder, threads=1)
        _run_serially(trials)
    records = [record for record in ledger.finished(trials.records) if record.role == "candidate"]
    return [
        summarise(records[:count], config.budget, meta.reference).hypervolume
        for count in range(GENERATION_SIZE, len(records) + 1, GENERATION_SIZE)
    ]


def _run_serially(trials: Trials) -> None:
    """Every trial of the schedule, to the end."""
    while not trials.halted and (spec := trials.next_spec()) is not None:
        trials.started(spec)
        for event in run_trial(replace(spec, rivals=())):
            trials.happened(spec, event)
    if trials.halted:
        raise StoppedError(trials.halted)


def tables(settings: Settings, curves: dict[tuple[str, int], list[float]]) -> list[Table]:
    """Hypervolume per seed at the end, and mean and spread over seeds after every generation."""
    final = Table(title=f"hypervolume (s*nat) after {settings.num_trials} trials of {settings.tokens:,} tokens")
    final.add_column("seed")
    for searcher in settings.searchers:
        final.add_column(searcher, justify="right")
    for seed in settings.seeds:
        final.add_row(str(seed), *(f"{curves[searcher, seed][-1]:.3f}" for searcher in settings.searchers))
    growth = Table(title="mean over seeds (standard deviation)")
    growth.add_column("trials")
    for searcher in settings.searchers:
        growth.add_column(searcher, justify="right")
    for step in range(min(map(len, curves.values()))):
        columns = [[curves[searcher, seed][step] for seed in settings.seeds] for searcher in settings.searchers]
        cells = [f"{statistics.mean(column):.3f} ({statistics.pstdev(column):.3f})" for column in columns]
        growth.add_row(str((step + 1) * GENERATION_SIZE), *cells)
    return [final, growth]
