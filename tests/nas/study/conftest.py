from collections.abc import Callable
from pathlib import Path

import pytest

from nas.corpus.corpus import Corpus
from nas.run.config import StudyConfig, study_recipe
from nas.searchers.strategy import SearchProblem, searcher_of
from nas.study.open_run import proposals_of
from nas.study.schedule import TrialSchedule
from nas.study.trials import Trials, TrialSetting
from search_spaces.notation import parse

ONE_TRIAL = StudyConfig(
    budget_latency="25s",
    space="tiny",
    scale="smoke",
    seq_len=16,
    tokens=1024,
    num_trials=1,
    finalist_seeds=0,
    searcher="stratified",
)


@pytest.fixture
def make_trials(feasible) -> Callable[..., Trials]:
    """Makes the trials of a run in a folder. anchors: notations of its first candidates, for `evolution`."""

    def make(
        folder: Path, corpus: Corpus, config=ONE_TRIAL, *, recipe=None, records=(), anchors=(), route=None
    ) -> Trials:
        members = tuple(parse(name, feasible.space.base) for name in anchors)
        searcher = searcher_of("evolution" if anchors else config.searcher)
        schedule = TrialSchedule(
            strategy=searcher(SearchProblem(feasible=feasible, anchors=members, reference_loss=6.0)),
            seed=config.seed,
            num_trials=config.num_trials,
            finalist_seeds=config.finalist_seeds,
            known=proposals_of(records, feasible.space.base),
        )
        setting = TrialSetting(
            config=config,
            recipe=recipe or study_recipe(config, route),
            folder=folder,
            corpus=corpus,
            device="cpu",
            versions={"python": "3"},
        )
        return Trials(schedule, feasible.priced.pricer, setting, records)

    return make
