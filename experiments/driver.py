"""Does what drives a search keep up with it? Seconds to load a run, to plot it and to propose what is next.

They are CPU seconds of one process, which do not grow with what else the machine waits for. What a searcher sets up for
its space is the same for every number of trials, and is told apart.

A run of so many candidates is made up: members drawn within the budget, losses from a sum over their layers, and all
the records of every trial, as a search writes them. It is then resumed and plotted by what resumes and plots any run;
only the trainings are not real.
"""

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from nas.study.open_run import open_trials
from rich.console import Console

from costmodel.errors import UserError
from experiments.bars import Figure, cpu_s, figure_table, fresh_process
from nas.api import load_run
from nas.corpus.corpus import Corpus
from nas.corpus.held_out import HeldOut
from nas.recipe.candidate import candidate_id, trial_id
from nas.run import ledger
from nas.run.config import StudyConfig, study_candidate
from nas.run.folder import Meta, write_config, write_meta
from nas.run.ledger import Record
from nas.searchers.strategy import Request, Room, searcher_of
from nas.study import open_run
from nas.study.priced_study import price_study
from nas.study.schedule import GENERATION_SIZE
from search_spaces.architecture import arch_id
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import price_of
from search_spaces.deployed import deployed
from search_spaces.notation import Member, placement

NUM_RUNGS = 3
SECONDS = "{:.2f} s"
CORPUS = Corpus(
    folder="made-up",
    data="stdlib",
    fingerprint="made-up",
    tokenizer="made-up",
    vocab_size=512,
    num_train_tokens=1 << 20,
    num_validation_tokens=1 << 16,
    held_out=HeldOut(),
    unigram_loss=6.0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Most seconds for a run of so many trials; None where nothing is asked."""

    trials: int
    load_s: float
    propose_s: float
    plot_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it. Raises UserError for a run that is no whole generations."""

    space: str
    searcher: str
    budget_latency: str
    seed: int
    bars: tuple[Bars, ...]

    def __post_init__(self) -> None:
        for bars in self.bars:
            if bars.trials % GENERATION_SIZE:
                raise UserError(f"`trials` must be a multiple of {GENERATION_SIZE}, but got {bars.trials}.")


def run(name: str, settings: Settings, console: Console) -> None:
    """Makes each run, times it and prints seconds beside bars."""
    for bars in settings.bars:
        figures = measured(settings, bars)
        console.print(figure_table(f"the driver: {settings.searcher} on {settings.space}, CPU seconds", figures))


def measured(settings: Settings, bars: Bars) -> list[Figure]:
    """Makes one run and times what drives it."""
    config = StudyConfig(
        budget_latency=settings.budget_latency,
        space=settings.space,
        searcher=settings.searcher,
        seed=settings.seed,
        num_trials=bars.trials + GENERATION_SIZE,
        num_looks=0,
        finalist_seeds=0,
        generation_size=GENERATION_SIZE,
        gpus_per_trial=0.0,
        parent="none",
    )
    feasible = price_study(config).feasible
    searcher_of(settings.searcher)  # imported
    with tempfile.TemporaryDirectory(prefix="nas-driver-") as folder:
        with fresh_process() as maker:  # who resumes a run did not make it
            records, meta = maker.submit(make_run, Path(folder), config, feasible, bars.trials).result()
        size_mb = (Path(folder) / ledger.FILE_NAME).stat().st_size / 1e6
        with tempfile.TemporaryDirectory(prefix="nas-driver-") as empty:
            setup_s = cpu_s(lambda: open_trials(config, feasible, CORPUS, meta, Path(empty)))
        load_s, first_s, propose_s = timed_resume(Path(folder), config, feasible, meta)
        plot_s = None if bars.plot_s is None else cpu_s(lambda: load_run(folder).plot())
    run_name = f"{bars.trials:,} trials, {records:,} records, {size_mb:.0f} MB"
    figures = [
        Figure(f"{run_name}: set-up", setup_s, SECONDS),
        Figure(f"{run_name}: load", load_s - setup_s, SECONDS, most=bars.load_s),
        Figure(f"{run_name}: first generation", first_s, SECONDS),
        Figure(f"{run_name}: the next one", propose_s, SECONDS, most=bars.propose_s),
    ]
    return figures if plot_s is None else [*figures, Figure(f"{run_name}: plot", plot_s, SECONDS, most=bars.plot_s)]


def timed_resume(folder: Path, config: StudyConfig, feasible: FeasibleSpace, meta: Meta) -> tuple[float, float, float]:
    """Seconds until a resumed run has replayed its ledger, set-up included, of the first generation, and of the next.

    The first one looks at every member there is; what it has seen of them is kept.
    """
    taken_s: list[float] = []
    begin_s = time.process_time()
    trials = open_trials(config, feasible, CORPUS, meta, folder)
    schedule = trials.schedule
    ask = schedule.strategy.requests

    def timed_requests(*args: Any) -> list[Request]:
        before_s = time.process_time()
        requests = ask(*args)
        taken_s.append(time.process_time() - before_s)
        return requests

    schedule.strategy.requests = timed_requests  # type: ignore[assignment, method-assign]
    spec = trials.next_spec()
    whole_s = time.process_time() - begin_s
    assert spec is not None
    assert spec.proposal.index == config.num_trials - GENERATION_SIZE
    seen = frozenset(proposal.member for proposal in schedule.proposals)
    room = Room(looks=0, ends=GENERATION_SIZE)
    timed_requests(GENERATION_SIZE, np.random.default_rng(config.seed), seen, schedule.trained(), room)
    return whole_s - taken_s[0], taken_s[0], taken_s[1]


def make_run(folder: Path, config: StudyConfig, feasible: FeasibleSpace, num_trials: int) -> tuple[int, Meta]:
    """Writes a run of so many completed candidates, none of which deploys as another; number of records, and meta."""
    rng = np.random.default_rng(config.seed)
    with patch.object(open_run, "ngram_baseline", return_value=None):  # of tokens that there are none of
        meta = open_run.new_meta(config, feasible, CORPUS, None, None, print)
    write_meta(folder, meta)
    write_config(folder, config)
    forms, records = set[object](), list[Record]()
    while len(forms) < num_trials:
        member = feasible.sample(rng)
        if (form := deployed(member.architecture)) not in forms:
            records += trial_records(config, feasible, meta, member, len(forms), rng)
            forms.add(form)
    ledger.write(folder / ledger.FILE_NAME, records)
    return len(records), meta


def trial_records(
    config: StudyConfig, feasible: FeasibleSpace, meta: Meta, member: Member, index: int, rng: np.random.Generator
) -> list[Record]:
    """All that a search writes of a candidate that completes."""
    architecture, pricer = member.architecture, feasible.priced.pricer
    candidate = study_candidate(meta.recipe, member)
    price, folded = price_of(feasible.priced, member), deployed(architecture)
    kept = sum((layer.attention != "none") + (layer.ffn in ("gelu", "relu")) for layer in architecture.layers)
    loss = 2.0 + 6.0 / (2 + kept) + 0.02 * float(rng.standard_normal())
    common: dict[str, Any] = {
        "trial_id": trial_id(candidate, seed=config.seed, attempt=0),
        "candidate_id": candidate_id(candidate),
        "arch_id": arch_id(architecture),
        "notation": member.name,
        "placement": placement(architecture),
        "entropy_regularised": member.entropy_regularised,
        "index": index,
        "generation": index // GENERATION_SIZE,
        "role": "candidate",
        "scale": meta.recipe.scale.name,
        "width": candidate.trained.d_model,
        "corpus": meta.corpus,
        "tokenizer": meta.tokenizer,
        "split": meta.split,
        "protocol": pricer.protocol,
        "network": pricer.network,
        "cost_model_id": pricer.cost_model_id,
        "rounds": price.rounds,
        "sent_bytes": price.sent_bytes,
        "latency_s": price.latency_s,
        "latency_s_range": None,
        "seed": config.seed,
        "versions": meta.versions,
        "deployed_id": arch_id(folded),
        "deployed": placement(folded),
        "predicted_latency_s": price.latency_s,
        "predicted_sent_bytes": price.sent_bytes,
    }
    rungs = [loss + 0.5 / (1 + rung) for rung in range(NUM_RUNGS)]
    return [
        Record(**common, event="proposed", status="proposed"),
        Record(**common, event="started", status="running"),
        *(
            Record(**common, event="rung", status="running", rung=rung, val_loss=rung_loss)
            for rung, rung_loss in enumerate(rungs)
        ),
        Record(
            **common, event="finished", status="completed", val_loss=loss, perplexity=math.exp(loss), fold_holds=True
        ),
    ]
