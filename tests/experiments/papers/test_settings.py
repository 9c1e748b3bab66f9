import math
from pathlib import Path

import pytest

from costmodel.config.strict_yaml import load_mapping
from experiments.__main__ import CONFIGS, definitions
from experiments.papers.run import settings_of
from experiments.papers.settings import PLAIN, Settings
from experiments.trainings import recipe_of

PAPERS = {path.stem: load_mapping(path) for path in sorted((CONFIGS / "papers").glob("*.yaml"))}


def settings_by_name(name: str) -> Settings:
    return settings_of(name, {key: value for key, value in PAPERS[name].items() if key != "kind"})


@pytest.mark.parametrize("name", PAPERS)
def test_every_experiment_decodes_and_its_rows_are_nets(name: str):
    assert name in definitions()
    settings = settings_by_name(name)
    assert all(settings.member(row).architecture.num_layers in (6, 12, 18) for row in settings.rows)
    plan = settings.plan
    for row in settings.rows:
        regularised = settings.member(row).entropy_regularised
        recipe = recipe_of(plan, plan.variants[settings.variant(row)], None, entropy_regularised=regularised)
        assert recipe.scale.seq_len == settings.seq_len  # at scale `proxy`, of 128 tokens, as the papers


def test_printed_perplexities_of_rows_with_costs_are_those_of_the_published_rows():
    printed = settings_by_name("ega-table-2").printed_perplexities
    assert (printed["SM+LN+G"], printed["EReg(SM(t)+ScFuFFN)"], printed["HH(SM+ScFuFFN)"]) == (2.69, 3.21, 3.97)
    assert printed["SM"] == math.inf
    assert math.isinf(settings_by_name("ega-table-2-t256").printed_perplexities["HH(SM+ScFuFFN)"])  # printed NaN


def test_rows_that_are_trained_alike_share_a_variant():
    settings = settings_by_name("norm-or-scale")
    plan = settings.plan
    assert settings.variant("SM") == settings.variant("scaled FFN") == PLAIN
    assert plan.pairs == frozenset(
        {
            (PLAIN, "SM"),
            ("WNorm of FFN", "SM"),
            ("SNorm of FFN", "SM"),
            (PLAIN, "SM+ScFFN"),
        }
    )
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
    data = {key: value for key, value in (PAPERS["entropy"] | changes).items() if key != "kind"}
    with pytest.raises(ValueError, match=text):
        settings_of("entropy", data)


def test_configs_are_in_a_folder_that_the_package_has():
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '"configs/*/*.yaml"' in project
