from dataclasses import replace

import pytest

from costmodel.errors import UserError
from nas.recipe.candidate import candidate_at, candidate_id
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.overrides import DistillationChanges, FoldableChanges, RecipeChanges, ScaleChanges
from nas.recipe.recipe import Foldable
from nas.run.config import StudyConfig, study_candidate, study_recipe
from nas.search import parse as parse_search
from search_spaces.bases import BASES
from search_spaces.notation import parse

CONFIG = StudyConfig(budget_latency="25s", space="tiny", scale="smoke", seq_len=16)


@pytest.mark.parametrize(
    ("name", "foldable"),
    [("SM+ScFuFFN", Foldable()), ("EReg(SM+ScFFN)", Foldable()), ("SM+LN+ScFuFFN", None), ("SM+R", None)],
)
def test_ffns_whose_price_is_that_of_nothing_are_kept_foldable(name, foldable):
    member = parse(name, BASES["tiny"])
    assert study_candidate(study_recipe(CONFIG, None), member).recipe.foldable == foldable
    written = study_candidate(study_recipe(replace(CONFIG, cost_of="unfolded"), None), member)
    assert written.recipe.foldable is None
    plain = candidate_at(member, "smoke", seq_len=16, tokens=None, data="stdlib")
    assert candidate_id(written) == candidate_id(plain)
    assert (candidate_id(study_candidate(study_recipe(CONFIG, None), member)) == candidate_id(plain)) == (
        foldable is None
    )


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"public_layers": "0-2"}, 3),
        ({"public_layers": "embed,0-1", "client_layers": 1}, 2),
        ({"client_layers": 4}, 4),
        ({}, None),
    ],
)
def test_layers_that_are_no_secret_stay_the_parents(given, kept):
    config, plain = replace(CONFIG, parent="builtin", **given), replace(CONFIG, parent="builtin")
    distillation = DistillationSchedule(parent="p", placement="12xLSLGo", spread_over_depth=True)
    recipe = study_recipe(config, distillation)
    assert (recipe.distillation.kept_layers, recipe.distillation.spread_over_depth) == (kept, kept is None)
    member = parse("SM+LN+R", BASES["gpt2-small"])
    ids = [candidate_id(study_candidate(study_recipe(variant, distillation), member)) for variant in (config, plain)]
    assert (ids[0] == ids[1]) == (kept is None)


def test_layers_that_are_no_secret_are_the_first_and_a_parents():
    with pytest.raises(UserError, match=r"--public-layers of a search must be the first ones, .* but got 1-2; leave"):
        replace(CONFIG, parent="builtin", public_layers="1-2")
    with pytest.raises(UserError, match=r"--public-layers and --client-layers are of --parent, .*; name it"):
        replace(CONFIG, client_layers=2)
    with pytest.raises(UserError, match=r"--public-layers of a search must be the first ones, .* but got head; leave"):
        replace(CONFIG, parent="builtin", public_layers="head")
    spread = RecipeChanges(distillation=DistillationChanges(spread_over_depth=True))
    with pytest.raises(UserError, match=r"--recipe.distillation.spread-over-depth moves layers that .* keep; drop it"):
        replace(CONFIG, parent="builtin", client_layers=2, recipe=spread)


def test_a_search_takes_changes_of_the_recipe():
    given = parse_search(["--budget-latency=25s", "--recipe.scale.batch=16", "--recipe.weight-decay=0.5"])
    recipe = study_recipe(StudyConfig(**given), None)
    assert (recipe.scale.batch, recipe.weight_decay, recipe.foldable) == (16, 0.5, Foldable())
    kept = study_recipe(replace(CONFIG, recipe=RecipeChanges(foldable=FoldableChanges(floor=0.3))), None)
    assert kept.foldable == Foldable(floor=0.3)
    with pytest.raises(UserError, match=r"--recipe\.scale\.head-dim is that of --scale in a search"):
        replace(CONFIG, recipe=RecipeChanges(scale=ScaleChanges(head_dim=8)))
