from dataclasses import replace

import pytest

from nas.recipe.overrides import EntropyChanges, FoldableChanges, RecipeChanges, ScaleChanges, changed
from nas.recipe.recipe import EntropyRegularisation, Foldable, Recipe

REGULARISED = Recipe(entropy=EntropyRegularisation())


def test_every_change_lands_where_it_belongs():
    changes = RecipeChanges(
        scale=ScaleChanges(learning_rate=0.5), entropy=EntropyChanges(weight=0.0), weight_decay=0.0, schedule="linear"
    )
    made = changed(REGULARISED, changes)
    assert (made.scale.learning_rate, made.entropy.weight) == (0.5, 0.0)
    assert (made.weight_decay, made.schedule) == (0.0, "linear")
    assert (made.beta2, made.scale.batch) == (REGULARISED.beta2, REGULARISED.scale.batch)


def test_stating_a_floor_keeps_ffns_foldable():
    made = changed(Recipe(), RecipeChanges(foldable=FoldableChanges(floor=0.3)))
    assert made.foldable == Foldable(floor=0.3)
    assert changed(made, RecipeChanges(foldable=FoldableChanges(every=4))).foldable == Foldable(floor=0.3, every=4)


def test_a_regulariser_that_is_not_there_cannot_be_changed():
    with pytest.raises(ValueError, match=r"\(margin\) need an architecture named EReg"):
        changed(Recipe(), RecipeChanges(entropy=EntropyChanges(margin=0.1)))


def test_the_published_form_needs_a_weight_of_its_own():
    form = EntropyChanges(form="published-code")
    with pytest.raises(ValueError, match="state --recipe.entropy.weight"):
        changed(REGULARISED, RecipeChanges(entropy=form))
    weighted = changed(REGULARISED, RecipeChanges(entropy=replace(form, weight=1e-5)))
    assert (weighted.entropy.form, weighted.entropy.weight) == ("published-code", 1e-5)


def test_values_are_checked_as_those_of_a_recipe():
    with pytest.raises(ValueError, match="`micro_batch` must divide `batch`"):
        changed(Recipe(), RecipeChanges(scale=ScaleChanges(micro_batch=3)))
