"""Replays on tables that are made up."""

from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from costmodel.cost import Budget
from costmodel.errors import UserError
from experiments.__main__ import settings_of
from experiments.searchers import benchmark, table
from experiments.searchers.benchmark import pool_of, tables, verdicts
from experiments.searchers.replay import Entry, Training, replay, replay_halving
from experiments.searchers.table import TablePart
from experiments.trainings import DATA, Rung, read_outcomes
from nas.searchers import trellis
from nas.searchers.strategy import SearchProblem
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_of, price_space
from search_spaces.deployed import deployed
from search_spaces.notation import placement
from search_spaces.space import Definition, build_space, load_space, member_at, num_members

BUDGET = Budget(latency_s=25.0)


@pytest.fixture(scope="module")
def problem(feasible) -> SearchProblem:
    space = load_space("tiny")
    names = [placement(member_at(space, index).architecture) for index in range(num_members(space))]
    few = tuple(dict.fromkeys(names))[::3]
    listed = Definition(name="few", base="tiny", members=few, entropy_regularisation=(False,))
    priced = price_space(build_space(listed), feasible.priced.pricer, 16)
    return SearchProblem(feasible=within_budget(priced, BUDGET), reference_loss=6.0)


@pytest.fixture(scope="module")
def entries(problem):
    """Dearer ones are better; one seed of each is lucky."""
    members = list(problem.feasible.members())
    prices = [price_of(problem.feasible.priced, member).latency_s for member in members]
    return {
        member: Entry(
            member=member,
            latency_s=price,
            trainings=tuple(_training(4 - price / 20 + luck) for luck in (0.0, -0.01, 0.01)),
        )
        for member, price in zip(members, prices, strict=True)
    }


def _training(loss: float | None) -> Training:
    rungs = (Rung(0.25, 1.5 * loss), Rung(0.5, 1.2 * loss)) if loss is not None else ()
    return Training(loss=loss, tokens=100, rungs=rungs)


@pytest.mark.parametrize("searcher", ["trellis", "stratified", "evolution", "tpe"])
def test_a_search_that_trains_all_of_the_table_has_no_regret(problem, entries, searcher, monkeypatch):
    for number in ("NUM_DRAWS", "NUM_RANDOM"):
        monkeypatch.setattr(trellis, number, 2)
    curve = replay(searcher, problem, entries, num_trials=1000, seed=0)
    assert curve.tokens[0] == 100  # a searcher that proxy_evals trains one to its end first
    assert list(curve.tokens) == sorted(curve.tokens)
    assert all(0 <= share <= 1 + 1e-9 for share in curve.shares)
    assert len(curve.tokens) > 3
    assert curve.shares[-1] > 0.99
    assert replay(searcher, problem, entries, num_trials=1000, seed=0) == curve


def test_one_that_diverged_is_not_scored(problem, entries):
    gone = {
        member: entry._replace(trainings=(_training(None), _training(1.0), _training(1.0)))
        for member, entry in entries.items()
    }
    kept = next(iter(entries))
    curve = replay("stratified", problem, gone | {kept: entries[kept]}, num_trials=1000, seed=0)
    assert set(curve.best) - {None} <= {entries[kept].point[1]}


def test_evaluations_cost_their_share_of_the_tokens_and_promotions_the_rest(problem, entries):
    curve = replay("trellis", problem, entries, num_trials=6, seed=0)
    spent = [after - before for before, after in pairwise((0, *curve.tokens))]
    assert (spent.count(25), spent.count(75)) == (12, 3)
    assert spent[0] == 100
    assert len(spent) == 16
    assert curve.shares[-1] > 0.9


def test_the_tables_have_every_searcher(problem, entries):
    curves = {
        name: [replay(name, problem, entries, 8, seed) for seed in range(3)] for name in ("stratified", "evolution")
    }
    console = Console(record=True, width=200)
    marks = [100 * num for num in range(1, 9)]
    for text_table in tables(curves, [1.0, None, 2.0, 3.0], marks):
        console.print(text_table)
    text = console.export_text()
    assert "stratified" in text
    assert "evolution" in text
    assert "0.0" in text
    for _, value, bar, verdict in verdicts(curves, "evolution", marks):
        assert verdict == ("PASS" if float(value) <= float(bar.removeprefix("<= ")) else "FAIL")


def test_halving_spends_a_quarter_on_half_of_the_candidates(problem, entries):
    curve = replay_halving(problem, entries, num_trials=4, seed=0)
    assert curve.tokens == (4 * 25 + 2 * 50 + 2 * 100,)
    assert 0 < curve.shares[0] <= 1
    assert replay_halving(problem, entries, num_trials=4, seed=0) == curve


def test_halving_counts_what_diverged(problem, entries):
    kept = min(entries, key=lambda member: entries[member].latency_s)  # on every front
    gone = {member: entry._replace(trainings=(_training(None),)) for member, entry in entries.items()}
    curve = replay_halving(problem, gone | {kept: entries[kept]}, num_trials=1000, seed=0)
    assert curve.tokens[-1] == 100 * len({deployed(member.architecture) for member in entries})


def test_pools_part_a_table(entries):
    final, development = pool_of(entries, "final"), pool_of(entries, "development")
    assert {*final, *development} == {*pool_of(entries, "all")}
    assert not {*final} & {*development}
    assert len(final) == len(entries) // 3


def test_a_table_of_which_little_is_trained_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "DATA", tmp_path)
    head = "candidate_id,corpus,seed,row,variant,perplexity,tokens,seconds,reason,rungs\n"
    rows = load_space(str(table.CONFIGS / "table-12-space.yaml")).definition.members
    (tmp_path / "few.csv").write_text(f"{head}c,x,0,{rows[0]},12,8.1,100,60,,\n")
    part = TablePart(space="table-12-space.yaml", parent="builtin", seeds=(0,), committed="few.csv", blocks="b.csv")
    with pytest.raises(UserError, match=r"few.csv must hold at least 8 architectures, but holds 1; train more"):
        benchmark.read_entries(part)


def test_a_searcher_or_part_that_is_not_there_is_refused_before_anything_is_replayed():
    whole = settings_of("search-benchmark")
    for changed in (replace(whole, judged="none"), replace(whole, parts={"99": next(iter(whole.parts.values()))})):
        with pytest.raises(UserError, match=r"`judged` must be one of trellis, .* and `parts` some of"):
            benchmark.run("search-benchmark", changed, Console())


def test_the_shipped_files_fit_together():
    whole = settings_of("table")
    assert settings_of("search-benchmark").parts.keys() <= whole.parts.keys()
    for name, part in whole.parts.items():
        assert len(table.table_rows(part)) >= 100
        assert table.table_space(part).base.num_layers == int(name)


@pytest.mark.parametrize("name", ["table", "table-known", "table-pythia", "table-english"])
def test_what_is_committed_is_of_the_parts(name):
    for part in settings_of(name).parts.values():
        committed = {record.row for record in read_outcomes(DATA / part.committed)}
        assert committed <= set(table.table_rows(part))
        regularised, *others = table.table_space(part).recipes
        assert others or all(row.startswith("EReg(") == regularised for row in committed)


def test_a_parent_that_is_to_be_made_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="'runs/parent-pythia-export' of part 'pythia' must be a folder"):
        table.run("table-pythia", settings_of("table-pythia"), Console(quiet=True))
