from dataclasses import replace

import pytest
from rich.console import Console

from costmodel.cost import Budget
from costmodel.errors import UserError
from costmodel.estimate import estimate
from costmodel.protocols import derived, load_pricer
from nas.plot import plot
from nas.report.what_if import WhatIf, reprice, what_if, what_if_lines, what_if_table
from nas.run import ledger
from nas.run.folder import write_config, write_meta
from search_spaces.architecture import arch_id
from search_spaces.budget.priced_space import price_architecture
from search_spaces.lower import Workload, lower
from search_spaces.notation import parse, placement
from search_spaces.space import load_space

SPACE = load_space("gpt2-small")
UNBOUNDED = Budget()
PUBLISHED, SEMI2K = load_pricer(), derived.load("semi2k", "wan")
# (name, role, nats): under `published` ScFFN costs more than ReLU's neighbours, and i6 is the cheapest
TRIALS = [
    ("SM+LN+G", "baseline", 1.0),
    ("SM+ScFuFFN", "candidate", 2.0),
    ("EReg(SM+ScFuFFN_i6)", "candidate", 2.5),
    ("SM_i12", "candidate", 3.0),
    ("SM+ScFFN", "candidate", 2.2),
]


@pytest.fixture
def records(make_record):
    """Trials at the prices of `published`, T=128; a paused one, which is never on a front, is much the best."""

    def record(index: int, name: str, role: str, loss: float, **changes):
        named = parse(name, SPACE.base).architecture
        price = estimate(lower(named, 128), PUBLISHED).total
        changes |= {"latency_s": price.latency_s, "sent_bytes": price.sent_bytes, "arch_id": arch_id(named)}
        changes |= {"placement": placement(named), "val_loss": loss, "perplexity": 2.718281828**loss}
        return make_record(index, notation=name, role=role, **changes)

    done = [record(index, *trial) for index, trial in enumerate(TRIALS)]
    return [*done, record(9, "SM+ScFuFFN_i4", "candidate", 0.1, status="paused")]


@pytest.fixture
def priced(make_run, records):
    """Makes what becomes of the run under other prices, by default `semi2k` on `wan` without a budget."""

    def make(pricer=SEMI2K, seq_len: int = 128, budget: Budget = UNBOUNDED, ngrams=None, trials=records) -> WhatIf:
        run = make_run(trials, meta={"base": SPACE.base, "ngrams": ngrams})
        return what_if(run, pricer, Workload(prompt_len=seq_len), budget)

    return make


def names(members) -> list[str]:
    return [member.notation for member in members]


def test_every_completed_trial_costs_what_estimate_says(priced):
    repricing = priced(seq_len=64)
    assert names(repricing.repriced) == [name for name, _, _ in TRIALS]
    for before, after in zip(repricing.run.members, repricing.repriced, strict=True):
        whole = estimate(lower(parse(after.notation, SPACE.base).architecture, 64), SEMI2K).total
        trial = after.first
        assert (trial.latency_s, trial.sent_bytes, trial.rounds) == (whole.latency_s, whole.sent_bytes, whole.rounds)
        assert (trial.protocol, trial.network, trial.cost_model_id) == ("semi2k", "wan", SEMI2K.cost_model_id)
        assert (after.val_loss, after.trial_id, after.role) == (before.val_loss, before.trial_id, before.role)


def test_the_runs_workload_is_priced(make_run, records):
    """A budget that all meet at the run's workload is met by all, whatever the whole prompt's logits would cost."""
    run = make_run(records, meta={"base": SPACE.base}, projection="last", new_tokens=3)
    repricing = what_if(run, PUBLISHED, run.workload, UNBOUNDED)
    for member in repricing.repriced:
        architecture = parse(member.notation, SPACE.base).architecture
        expected = price_architecture(architecture, PUBLISHED, run.workload, "unfolded")
        assert member.first.latency_s == pytest.approx(expected.price.latency_s)
    assert what_if_lines(repricing)[1] == "now:  published, T=128, projection last, 3 new tokens, no budget"


def test_the_front_is_found_again_with_baselines_and_a_budget_takes_members_out(priced):
    repricing = priced()
    assert names(repricing.run.front) == ["SM_i12", "EReg(SM+ScFuFFN_i6)", "SM+ScFuFFN"]
    assert names(repricing.after)[-1] == "SM+LN+G"  # the best perplexity at any price
    statuses = {member.notation: repricing.status(member) for member in repricing.shown}
    assert statuses == {**dict.fromkeys(names(repricing.run.front), "stays"), "SM+LN+G": "enters"}
    bound = next(member.sent_bytes for member in repricing.repriced if member.notation == "EReg(SM+ScFuFFN_i6)")
    repricing = priced(budget=Budget(sent_bytes=bound))
    assert names(repricing.after) == ["SM_i12", "EReg(SM+ScFuFFN_i6)"]
    assert {member.notation: repricing.status(member) for member in repricing.shown}["SM+ScFuFFN"] == "over budget"


def printed(*shown) -> str:
    console = Console(record=True, width=250)
    for part in shown:
        console.print(part)
    return console.export_text()


def test_what_survives_is_told(priced, ngrams, snapshot):
    """SM_i12 is above the trigram of 18: exp(3.0)."""
    for name, repricing in {
        "survivors": priced(),
        "survivors at another length": priced(seq_len=64),
        "survivors and a trigram": priced(ngrams=ngrams),
        "no survivors": priced(budget=Budget(latency_s=0.001)),
    }.items():
        snapshot(name, printed(what_if_table(repricing), *what_if_lines(repricing)))


def test_a_member_that_another_overtakes_is_said_to_be_dominated(priced, records):
    """SM+ScFFN is made the cheapest: it then dominates whatever is worse."""

    class Odd(derived.Derived):
        def price(self, op):
            price = super().price(op)
            identity = type(op).__name__ == "Linear" and op.out_features == 3072
            return replace(price, latency_s=0.0 if identity else 1.0)

    odd = Odd(**{name: getattr(SEMI2K, name) for name in SEMI2K.__dataclass_fields__})
    trials = [replace(record, val_loss=1.5) if record.notation == "SM+ScFFN" else record for record in records]
    repricing = priced(odd, trials=trials)
    assert "dominated" in {repricing.status(member) for member in repricing.shown}
    assert "dominated by " in printed(what_if_table(repricing))


def test_pricing_anew_leaves_the_run_as_it_is(records, make_run, capsys):
    made = make_run(records, meta={"base": SPACE.base})
    write_config(made.folder, made.config)
    write_meta(made.folder, made.meta)
    ledger.append(made.folder / ledger.FILE_NAME, *records)
    before = {path: path.read_bytes() for path in made.folder.iterdir()}
    plot(str(made.folder), protocol="semi2k", network="wan", seq_len=64, budget_latency="5min")
    assert "enters" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in made.folder.iterdir()} == before


def test_a_protocol_of_the_run_has_the_network_that_the_run_gave_it(make_run, records):
    run = make_run(records, meta={"base": SPACE.base}, protocol="published,semi2k,sigma", network="semi2k=wan")
    for protocol, setting in (("semi2k", "semi2k on wan, T=128"), ("sigma", "sigma on lan, T=128")):
        assert what_if_lines(reprice(run, protocol=protocol))[1] == f"now:  {setting}, no budget"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"protocol": "published,sigma"}, "--protocol must be one protocol here, but got published,sigma; give one"),
        ({"budget_latency": "aby3=60s"}, "--budget-latency must be a positive number with a unit"),
        ({"budget_keys": "8"}, "--budget-keys must be a positive number with a unit"),
        ({}, "no completed trial yet"),
    ],
)
def test_what_cannot_be_priced_anew_is_refused(make_run, records, asked, message):
    run = make_run(records if asked else records[-1:], meta={"base": SPACE.base})
    with pytest.raises(UserError, match=message):
        reprice(run, **{"protocol": "sigma", **asked})
