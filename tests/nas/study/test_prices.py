import csv
from dataclasses import replace
from typing import Any

import pytest

from costmodel.config.units import format_seconds
from costmodel.cost import Costs
from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from nas.conversion.parent import BUILTIN, Parent
from nas.conversion.pretrained import Pretrained
from nas.recipe.recipe import SCALES, trained_architecture
from nas.report.summary import sent_text
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.run.members import found_infeasible, front
from nas.run.tables import write_tables
from nas.study.priced_study import price_study
from nas.study.trials import price_fields
from nas.study.worker import run_trial
from search_spaces.bases import BASES
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import most_expensive, price_architecture, price_of
from search_spaces.deployed import deployed
from search_spaces.lower import Workload
from search_spaces.notation import parse
from search_spaces.space import members
from tests.nas.study.conftest import ONE_TRIAL

BOTH = replace(ONE_TRIAL, protocol="semi2k,sigma", budget_latency="semi2k=0.28s,sigma=100ms", network="semi2k=lan")


@pytest.fixture(scope="module")
def feasible() -> FeasibleSpace:
    return price_study(BOTH).feasible


@pytest.mark.parametrize(("protocol", "new_tokens"), [("published", 1), ("semi2k", 3)])
def test_the_first_lines_name_what_costs_nothing(protocol, new_tokens):
    config = StudyConfig(budget_latency="5min", space="tiny", protocol=protocol, new_tokens=new_tokens, seq_len=16)
    priced = price_study(config)
    architecture = most_expensive(priced.feasible.priced).architecture
    cheaper = {"projection": "last", "rows": "needed"} if new_tokens == 1 else {"client_layers": 0}
    workload = replace(config.workload, deployment=replace(config.workload.deployment, **cheaper))
    price = price_architecture(architecture, priced.feasible.priced.pricer, workload, "folded").price
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in cheaper.items())
    shown = f"with flags of `costmodel estimate`, the most expensive: {format_seconds(price.latency_s)} with {flags}"
    assert priced.lines[-1].startswith(shown)
    assert max(map(len, priced.lines[-2:])) < 200
    assert "costs are those of the folded models" in priced.lines[1]
    assert priced.lines[-2].startswith("with --projection last: ")


def test_members_are_within_the_budget_of_every_protocol(feasible):
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
def test_budgets_that_do_not_go_with_the_protocols_are_refused(changes, said):
    asked: dict[str, Any] = {"protocol": "semi2k,sigma", "budget_latency": "1s", **changes}
    with pytest.raises(UserError, match=said):
        StudyConfig(**asked)


def test_shares_are_of_what_the_parent_takes_under_each_protocol(tmp_path):
    (tmp_path / "few.yaml").write_text("name: few\nbase: gpt2-small\nmembers: [SM+LN+G, SM_i12]\n")
    asked: dict[str, Any] = {"space": str(tmp_path / "few.yaml"), "protocol": "semi2k,sigma", "parent": BUILTIN}
    whole, half = (
        price_study(StudyConfig(**asked, budget_latency=share, budget_comm="sigma=1GB")).config.budgets
        for share in ("100%", "50%")
    )
    shares = {name: half[name].latency_s / whole[name].latency_s for name in whole}
    assert shares == pytest.approx({"semi2k": 0.5, "sigma": 0.5}, rel=1e-4)
    assert [half[name].sent_bytes for name in half] == [None, 1e9]
    architecture, workload = parse("SM+LN+G", BASES["gpt2-small"]).architecture, Workload(prompt_len=128)
    parent = price_architecture(architecture, load_pricer("semi2k"), workload, "folded").price
    assert whole["semi2k"].latency_s == parent.latency_s  # so the parent fits
    assert whole["semi2k"] != whole["sigma"]


def test_a_trial_is_priced_under_each(feasible, make_trials, make_run, corpus, tmp_path):
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


def of_parent(monkeypatch: pytest.MonkeyPatch, notation: str, **given: Any) -> StudyConfig:
    """A study from a parent of these layers."""
    theirs = trained_architecture(parse(notation, BASES["tiny"]).architecture, SCALES["smoke"])
    model = Pretrained(architecture=theirs, weights={}, tokenizer=None)
    monkeypatch.setattr("nas.study.parent.load_parent", lambda name: Parent(name, model, "digest"))
    return replace(ONE_TRIAL, parent="made", protocol="semi2k", **given)


@pytest.mark.parametrize(
    ("notation", "kept", "said"),
    [
        ("2xLSLGo", 0, "no layer"),
        ("2xlSlGo", 1, "1xlSlGo"),  # its embedding takes up the linear FFNs behind it
        ("1xLSooo-1xLSLGo", 1, "1xLSooo"),  # an FFN behind it would be of layer 0
        ("1xooLGo-1xLSLGo", 1, "1xooLGo"),
    ],
)
def test_layers_that_folding_may_change_are_refused(notation, kept, said, monkeypatch):
    for given in ({"client_layers": kept}, {"public_layers": f"embed,0-{kept - 1}" if kept else "embed"}):
        with pytest.raises(UserError, match=f"must keep layers of --parent that .*, but got {said}; keep others, or"):
            price_study(of_parent(monkeypatch, notation, **given))


def test_every_member_is_priced_with_them_at_the_client_unless_a_space_lists_its_members(monkeypatch):
    config = of_parent(monkeypatch, "1xLSMFo-1xLSLGo", client_layers=1)
    priced, pricer = price_study(config).feasible.priced, load_pricer("semi2k")
    for member in members(priced.space):
        whole = price_architecture(member.architecture, pricer, config.workload, "folded").price
        assert price_of(priced, member).sent_bytes == pytest.approx(whole.sent_bytes)
    with pytest.raises(UserError, match="offers choices for each layer, but ladder lists its members; leave them out"):
        price_study(of_parent(monkeypatch, "2xLSLGo", space="ladder", client_layers=1))
