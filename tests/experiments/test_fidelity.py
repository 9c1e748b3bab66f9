import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from costmodel.config.schema import decode
from costmodel.protocols.published_rows import published_rows
from experiments import fidelity, trainings
from experiments.__main__ import definitions, kind_of, settings_of
from experiments.fidelity import Settings
from experiments.trainings import Job, Variant, recipe_of
from nas.conversion.parent import load_parent
from nas.recipe.overrides import RecipeChanges, ScaleChanges
from nas.recipe.papers import recipe_for
from nas.recipe.recipe import Foldable
from nas.run.config import StudyConfig, study_recipe

SETTINGS: dict[str, Settings] = {name: settings_of(name) for name in definitions() if kind_of(name) == "fidelity"}


@pytest.mark.parametrize("name", SETTINGS)
def test_printed_perplexities_are_those_of_the_published_rows(name: str):
    printed = {
        row.notation: row.perplexity
        for row in published_rows()
        if (row.dataset, row.num_layers, row.seq_len) == ("CodeParrot", 12, 128)
    }
    published = SETTINGS[name].published
    shared = published.keys() & printed.keys()
    assert shared
    assert {row: published[row] for row in shared} == {row: printed[row] or math.inf for row in shared}


def test_a_variant_changes_what_it_names_and_nothing_else():
    settings = SETTINGS["fidelity"].plan
    plain = recipe_of(settings, Variant(seeds=(0,)), None, entropy_regularised=False)
    assert plain == recipe_for(settings.scale, "stdlib", entropy_regularised=False)
    given = RecipeChanges(optimizer="adamw", scale=ScaleChanges(batch=2, vocab_size=512))
    other = recipe_of(settings, Variant(seeds=(0,), tokens=99, recipe=given), None, entropy_regularised=False)
    scale = replace(plain.scale, tokens=99, batch=2, micro_batch=2, vocab_size=512)
    assert other == replace(plain, optimizer="adamw", scale=scale)


def test_from_a_parent_the_recipe_is_that_of_a_search():
    settings, parent = SETTINGS["fidelity"].plan, load_parent("builtin")
    recipe = recipe_of(settings, Variant(seeds=(0,), parent="builtin"), parent, entropy_regularised=True)
    assert replace(recipe, foldable=Foldable()) == study_recipe(StudyConfig(budget_latency="5min"), parent.route)


@pytest.mark.parametrize(("rows", "variants"), [({"SM": 1.0}, {"1x": {"seeds": [0]}}), ({"SM": 1.0, "SM+R": 2.0}, {})])
def test_nothing_to_compare_is_refused(rows: dict, variants: dict):
    data = {"scale": "smoke", "base": "tiny", "rows": rows, "variants": variants}
    with pytest.raises(ValueError, match="must hold at least"):
        decode(Settings, data, "experiment x")


def test_it_runs_small_and_a_finished_training_is_not_repeated(text: str, tmp_path: Path):
    data = {
        "scale": "smoke",
        "base": "tiny",
        "data": text,
        "rows": {"SM+LN+G": 2.69, "SM+ScFuFFN": 3.48},
        "variants": {"1x": {"seeds": [0], "tokens": 2048}, "short": {"seeds": [0], "tokens": 1024}},
    }
    settings, folder = decode(Settings, data, "x"), tmp_path / "runs/experiments/fidelity/smoke"
    told = []
    for _ in range(2):
        console = Console(record=True, width=200)
        fidelity.run("fidelity", settings, console)
        told.append(console.export_text())
    assert "short: " in told[0]
    assert "4 of 4" in told[0]
    tables = [text[text.index("validation perplexity: mean") :] for text in told]
    assert tables[0] == tables[1]
    again = [trainings.training(settings.plan, Job("1x", 0, "SM+LN+G"), folder) for _ in range(2)]
    assert again[0] == again[1]  # the seconds too: read from the checkpoint
