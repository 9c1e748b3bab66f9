from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import UserError
from experiments.coverage import cases_of, held_of
from nas.run.config import StudyConfig
from nas.run.run import Run


def documents(rng: np.random.Generator, num: int = 60) -> tuple[tuple[float, float], ...]:
    weights = rng.uniform(0.2, 1.0, num)
    return tuple(zip((weights / weights.sum()).tolist(), rng.normal(2.0, 0.3, num).tolist(), strict=True))


def test_of_independent_documents_intervals_hold_as_a_normal_distribution_says():
    rng = np.random.default_rng(0)
    held = held_of([documents(rng) for _ in range(40)], 10, rng)
    assert held.alone == pytest.approx(0.84, abs=0.04)
    assert held.both == pytest.approx(0.95, abs=0.03)


def test_a_half_of_one_document_has_no_error_and_holds_nothing():
    assert held_of([((0.5, 1.0), (0.5, 1.0))], 1, np.random.default_rng(0)) == (0.0, 0.0)


def test_members_and_neighbours_of_a_run_are_cases(over_seeds, make_meta):
    rng = np.random.default_rng(0)
    cheap = over_seeds(0, 2.0, latency_s=100.0, documents=documents(rng))
    better = over_seeds(1, 1.9, latency_s=200.0, documents=documents(np.random.default_rng(0)))
    config = StudyConfig(budget_latency="5min")
    source = Run(folder=Path("a"), config=config, meta=make_meta(), records=(*cheap, *better))
    cases = cases_of(source)
    assert [len(kind) for kind in cases.values()] == [2, 1]
    assert all(loss == 0 for _, loss in cases["differences of neighbours"][0])
    with pytest.raises(UserError, match="two members on its front"):
        cases_of(replace(source, records=tuple(cheap)))
