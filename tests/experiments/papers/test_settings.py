import math
from pathlib import Path

import pytest
from rich.console import Console

from experiments.__main__ import definitions, kind_of, settings_of
from experiments.papers import run as papers
from experiments.papers.settings import PLAIN, Settings
from experiments.trainings import recipe_of

PAPERS: dict[str, Settings] = {name: settings_of(name) for name in definitions() if kind_of(name) == "paper"}


@pytest.mark.parametrize("name", PAPERS)
def test_every_experiment_decodes_and_its_rows_are_nets(name: str):
    settings = PAPERS[name]
    assert all(settings.member(row).architecture.num_layers in (6, 12, 18) for row in settings.rows)
    plan = settings.plan
    for row in settings.rows:
        regularised = settings.member(row).entropy_regularised
        recipe = recipe_of(plan, plan.variants[settings.variant(row)], None, entropy_regularised=regularised)
        assert recipe.scale.seq_len == settings.seq_len  # at scale `proxy`, of 128 tokens, as the papers


def test_printed_perplexities_of_rows_with_costs_are_those_of_the_published_rows():
    printed = PAPERS["ega-table-2"].printed_perplexities
    assert (printed["SM+LN+G"], printed["EReg(SM(t)+ScFuFFN)"], printed["HH(SM+ScFuFFN)"]) == (2.69, 3.21, 3.97)
    assert printed["SM"] == math.inf
    assert math.isinf(PAPERS["ega-table-2-t256"].printed_perplexities["HH(SM+ScFuFFN)"])  # printed NaN


def test_rows_that_are_trained_alike_share_a_variant():
    settings = PAPERS["norm-or-scale"]
    plan = settings.plan
    assert settings.variant("SM") == settings.variant("scaled FFN") == PLAIN
    rows = {(PLAIN, "SM"), ("WNorm of FFN", "SM"), ("SNorm of FFN", "SM"), (PLAIN, "SM+ScFFN")}
    assert plan.pairs == frozenset(rows)
    assert plan.variants["SNorm of FFN"].normalisation.kind == "spectral"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"views": ["cost"]}, "must be of operations, costs, .* but got 'cost'"),
        ({"views": ["quarters"], "seeds": []}, "view 'quarters' of experiment entropy is of trainings; state `seeds`"),
        ({"rows": {}}, "`rows` and `views` must hold at least one"),
        ({"rows": {"SM": {"perplexity": "bad"}}}, "`perplexity` must be a number or `diverged`"),
        ({"rows": {"SM": {}}}, "`printed_shares` must be of `rows`"),
    ],
)
def test_bad_settings_are_refused_in_a_line(changes: dict, text: str):
    with pytest.raises(ValueError, match=text):
        papers.run("entropy", settings_of("entropy", **changes), Console(quiet=True))


def test_configs_are_in_a_folder_that_the_package_has():
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '"configs/*/*.yaml"' in project
