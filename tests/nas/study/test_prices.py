"""A search under several protocols: members within the budget of each, priced under each, on a front of the first."""

import csv
from dataclasses import replace
from typing import Any

import pytest

from costmodel.cost import Costs
from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN
from nas.report.summary import sent_text
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.front import found_infeasible, front
from nas.run.tables import write_tables
from nas.study.priced_study import price_study
from nas.study.trials import price_fields
from nas.study.worker import run_trial
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import price_of
from search_spaces.deployed import deployed
from search_spaces.space import members
from tests.nas.study.conftest import ONE_TRIAL

BOTH = replace(ONE_TRIAL, protocol="semi2k,sigma", budget_latency="semi2k=0.28s,sigma=100ms", network="semi2k=lan")


@pytest.fixture(scope="module")
def feasible() -> FeasibleSpace:
    return price_study(BOTH).feasible


def test_members_are_within_the_budget_of_every_protocol(feasible: FeasibleSpace) -> None:
    first, other = feasible.every
    for member in members(feasible.space):
        price, also = price_of(first.priced, member), Costs.of(price_of(other.priced, member))
        within = first.budget.admits(price) and other.budget.admits(also)
        assert feasible.fits(member) == BOTH.budget.admits(price, {"sigma": also}) == within
        assert not BOTH.budget.admits(price)
    assert 0 < feasible.num_feasible < sum(1 for _ in members(feasible.space))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"budget_latency": "sigma=2s"}, "--budget-latency must bound the first protocol, semi2k, whose seconds the"),
        ({"budget_latency": "semi2k=1s,aby3=2s"}, r"of what --protocol names \(semi2k, sigma\), but got 'aby3=2s'"),
        ({"budget_comm": "semi2k=50%"}, "a budget of 50% is a share of what --parent takes; name it, or give a unit"),
    ],
)
def test_budgets_that_do_not_go_with_the_protocols_are_refused(changes: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"protocol": "semi2k,sigma", "budget_latency": "1s", **changes}
    with pytest.raises(UserError, match=said):
        StudyConfig(**asked)


def test_shares_are_of_what_the_parent_takes_under_each_protocol() -> None:
    asked = StudyConfig(protocol="semi2k,sigma", budget_latency="50%", budget_comm="sigma=1GB", parent=BUILTIN)
    whole, half = (price_study(config).config.budgets for config in (replace(asked, budget_latency="100%"), asked))
    shares = [(half[name].latency_s or 0) / (whole[name].latency_s or 1) for name in asked.protocols]
    assert shares == pytest.approx([0.5, 0.5], rel=1e-4)
    assert [half[name].sent_bytes for name in asked.protocols] == [None, 1e9]
    assert whole["semi2k"] != whole["sigma"]


def test_a_trial_is_priced_under_each(feasible, make_trials, make_run, corpus, tmp_path) -> None:
    trials = make_trials(tmp_path, corpus, BOTH)
    trial = trials.next_trial()
    trials.started(trial)
    for record in run_trial(trial):
        trials.happened(record)
    run = make_run(ledger.read(trials.path), protocol=BOTH.protocol, budget_latency=BOTH.budget_latency)
    (record,), costs = run.completed, price_fields(deployed(trial.member.architecture), feasible)["also"]["sigma"]
    assert record.also == record.predicted_also == {"sigma": costs}
    (member,) = run.front
    assert "; under sigma " in sent_text(member)
    write_tables(run)
    (row,) = csv.DictReader((run.folder / "pareto.csv").read_text().splitlines())
    assert float(row["sigma_latency_s"]) == costs.latency_s
    assert float(row["sigma_key_bytes"]) == costs.key_bytes
    tighter = replace(BOTH, budget_latency="semi2k=0.28s,sigma=0.001ms").budget
    assert front(run.records, tighter) == ()
    assert found_infeasible(run.records, tighter) == ()  # by rule already
