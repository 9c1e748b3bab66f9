from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nas.conversion.parent import Parent
from nas.conversion.pretrained import Pretrained
from nas.corpus.corpus import Corpus, prepare
from nas.corpus.documents import GivenTokenizer
from nas.model.decoder import build
from nas.model.weights import deployed_weights
from nas.recipe.recipe import SCALES, trained_architecture
from nas.run.config import StudyConfig, study_recipe
from nas.searchers.strategy import Observation, SearchProblem, Suggestion, searcher_of
from nas.study.open_trials import proposals_of
from nas.study.schedule import TrialSchedule
from nas.study.trials import Trials, TrialSetting
from search_spaces.bases import BASES
from search_spaces.notation import parse

ONE_TRIAL = StudyConfig(
    budget_latency="25s", space="tiny", scale="smoke", seq_len=16, tokens=1024, num_trials=1, finalist_seeds=0,
    searcher="stratified",
)  # fmt: skip


def untrained_parent(corpus: Corpus, output_scale: float = 1.0) -> Parent:
    """A parent of the tiny space at scale `smoke`, what its sub-layers put out scaled."""
    architecture = trained_architecture(parse("SM+LN+G", BASES["tiny"]).architecture, SCALES["smoke"])
    model = build(architecture, torch.Generator().manual_seed(5))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                value.mul_(output_scale)
    weights = {name: value.contiguous().clone() for name, value in deployed_weights(model).items()}
    tokenizer = (Path(corpus.folder) / "tokenizer.json").read_text()
    given = GivenTokenizer(name="bpe", json=tokenizer, end_of_text="<|endoftext|>")
    return Parent("made", Pretrained(architecture, weights, given), "digest")


@pytest.fixture
def texts(source_files: str) -> Corpus:
    """The corpus of `parent`, with its tokenizer."""
    return prepare(source_files, vocab_size=512)


@pytest.fixture
def parent(texts: Corpus) -> Parent:
    """A model of random weights that are far from 0, so that every sub-layer of it matters."""
    return untrained_parent(texts, output_scale=4.0)


def run_schedule(
    plan: TrialSchedule, outcome: Callable[[Suggestion], Observation], order: Callable[[int], int]
) -> tuple[Suggestion, ...]:
    """Runs a schedule, two trials at a time; `order` says which of the running trials ends next."""
    running: list[Suggestion] = []
    while True:
        while len(running) < 2 and (proposal := plan.ask()) is not None:
            running.append(proposal)
        if not running:
            assert plan.finished
            return tuple(plan.proposals)
        plan.tell(outcome(running.pop(order(len(running)))))


@pytest.fixture
def make_trials(feasible) -> Callable[..., Trials]:
    """Makes the trials of a run in a folder. initial: notations of its first candidates; then none are left to ask."""

    def make(
        folder: Path, corpus: Corpus, config=ONE_TRIAL, *, recipe=None, records=(), initial=(), distillation=None
    ) -> Trials:
        strategy: Any = searcher_of(config.searcher)(SearchProblem(feasible=feasible, reference_loss=6.0))
        if initial:
            members = [parse(name, feasible.space.base) for name in initial]
            strategy.propose = lambda size, rng, seen, trained: [new for new in members if new not in seen][:size]
        known = proposals_of(records, feasible.space.base)
        counts: dict[str, Any] = {
            name: getattr(config, name) for name in ("seed", "num_trials", "finalist_seeds", "most_replicates")
        }
        counts |= {"num_proxy_evals": config.most_proxy_evals}
        schedule = TrialSchedule(strategy=strategy, reference=(40.0, 6.0), known=known, **counts)
        given: dict[str, Any] = {"folder": folder, "corpus": corpus, "device": "cpu", "versions": {"python": "3"}}
        setting = TrialSetting(config=config, recipe=recipe or study_recipe(config, distillation), **given)
        return Trials(schedule, feasible, setting, records)

    return make
