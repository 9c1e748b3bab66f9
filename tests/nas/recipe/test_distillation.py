from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nas.recipe.candidate import Candidate, candidate_id
from nas.recipe.distillation import (
    DistillationSchedule,
    Part,
    fitted_parts,
    initial_architecture,
    removed_parts,
    student_architecture,
)
from nas.recipe.recipe import SCALES, Recipe, from_parent
from search_spaces.architecture import Architecture, Layer, default_final_norm
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.deployed import deployed
from search_spaces.forms import Attention, Ffn, Norm
from search_spaces.notation import parse, placement

PARENT = parse("SM+LN+G", base_architecture("tiny", Dimensions(layers=4))).architecture
NORMS: tuple[Norm, ...] = ("layernorm", "frozen-layernorm", "frozen-rmsnorm", "none")


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    attention: Attention = draw(
        st.sampled_from(("softmax", "softmax-temperature", "softmax-half", "2quad", "power8", "none"))
    )
    ffn: Ffn = draw(st.sampled_from(("gelu", "relu", "leaky-relu", "square", "identity", "fused", "none")))
    return Layer(
        norm1="none" if attention == "none" else draw(st.sampled_from(NORMS)),
        attention=attention,
        norm2="none" if ffn == "none" else draw(st.sampled_from(NORMS)),
        ffn=ffn,
        stabiliser="none" if ffn == "none" else draw(st.sampled_from(("none", "scaled"))),
    )


@st.composite
def targets(draw: st.DrawFn) -> Architecture:
    placed = tuple(draw(st.lists(layers(), min_size=4, max_size=4)))
    return replace(PARENT, layers=placed, final_norm=default_final_norm(placed))


def sized(name: str) -> Architecture:
    return parse(name, PARENT).architecture


@given(targets())
def test_what_is_trained_deploys_as_the_target_does(target):
    assert deployed(student_architecture(target, PARENT, spread=True)) == deployed(target)


@given(targets())
def test_what_is_trained_has_a_norm_wherever_it_reads_the_stream_and_is_its_own_route(target):
    trained = student_architecture(target, PARENT, spread=True)
    assert all(layer.norm1 != "none" for layer in trained.layers if layer.attention != "none")
    assert all(layer.norm2 != "none" for layer in trained.layers if layer.ffn != "none")
    assert student_architecture(trained, PARENT, spread=True) == trained


@pytest.mark.parametrize(
    ("target", "trained"),
    [
        ("2xlSlRo-2xooooo", "1xlSlRo-2xooooo-1xlSlRo"),
        ("3xlSlRo-1xooooo", "3xlSlRo-1xooooo"),
        ("1xlSlRo-3xooooo", "1xlSlRo-3xooooo"),
        ("1xlSlRo-1xooooo-1xlSlRo-1xooooo", "1xlSlRo-1xooooo-1xlSlRo-1xooooo"),  # as it says
    ],
)
def test_layers_before_a_tail_of_empty_ones_are_spread(target, trained):
    assert placement(student_architecture(sized(target), PARENT, spread=True)) == placement(sized(trained))


def test_only_where_layers_are_spread_the_candidate_is_another():
    """So that runs from before there was this go on as they were."""
    recipe, spread = (
        from_parent(
            Recipe(scale=SCALES["smoke"]),
            DistillationSchedule(parent="p", placement="4xLSLGo", spread_over_depth=is_spread),
        )
        for is_spread in (False, True)
    )
    tail, whole = sized("2xlSlRo-2xooooo"), sized("SM+R")
    made = {
        architecture: [Candidate(architecture=architecture, recipe=variant) for variant in (recipe, spread)]
        for architecture in (tail, whole)
    }
    ids = {architecture: [candidate_id(candidate) for candidate in both] for architecture, both in made.items()}
    assert ids[tail][0] != ids[tail][1]
    assert ids[whole][0] == ids[whole][1]
    assert placement(made[tail][0].trained).startswith("2xlSlRo")


@given(targets())
def test_training_begins_with_every_part_of_the_parent(target):
    begun = initial_architecture(student_architecture(target, PARENT, spread=True), PARENT)
    assert list(removed_parts(begun, PARENT)) == []
    assert all(layer.attention != "none" for layer in begun.layers)
    assert all(layer.ffn not in ("none", "identity") for layer in begun.layers)


def test_the_removed_parts_by_layer():
    trained = student_architecture(sized("1xooLRo-1xoSooo-1xlSlIs-1xLSLGo"), PARENT, spread=True)
    assert list(removed_parts(trained, PARENT)) == [Part(0, "attention"), Part(1, "ffn")]
    assert fitted_parts(trained, PARENT) == [Part(2, "ffn")]
    assert placement(trained) == "1xooLRo-1xlSooo-1xlSlFs-1xLSLGo"
    assert placement(initial_architecture(trained, PARENT)) == "1xLSLRo-1xlSLGo-1xlSlFs-1xLSLGo"


def test_a_parent_without_norms_gives_none():
    parent = sized("SM+G")
    assert student_architecture(sized("SM+R"), parent, spread=True) == sized("SM+R")


def test_gates_fall_from_one_to_nothing_between_their_shares():
    distillation = DistillationSchedule(parent="p", placement="4xLSLGo", start_share=0.25, end_share=0.75)
    assert [distillation.gate_at(step, 16) for step in (0, 4, 6, 8, 10, 12, 16)] == [1, 1, 0.75, 0.5, 0.25, 0, 0]


SHARES = "a distillation schedule needs 0 <= `start_share` < `end_share` <= 1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"start_share": start, "end_share": end}, SHARES)
            for start, end in ((0.5, 0.5), (-0.1, 0.4), (0.5, 1.1), (float("nan"), 0.5))
        ),
        ({"prediction_weight": 1.5}, "`prediction_weight` of a schedule must be from 0 to 1, but got 1.5"),
        ({"linear_fit_tokens": 0}, "`linear_fit_tokens` of a schedule must be at least 1"),
    ],
)
def test_impossible_schedules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DistillationSchedule(parent="p", placement="4xLSLGo", **changes)


@pytest.mark.parametrize("scale", ["proxy", "parent"])
@pytest.mark.parametrize(("distillation", "streams"), [(0.95, 10.0), (0.0, 0.0)])
def test_a_schedule_without_predictions_uses_no_hidden_states(scale, distillation, streams):
    distillation = DistillationSchedule(parent="p", placement="4xLSLGo", prediction_weight=distillation)
    taught = from_parent(Recipe(scale=SCALES[scale]), distillation).distillation
    assert taught.hidden_state_weight == streams


def test_a_linear_fit_is_a_part_of_those_candidates_that_have_one():
    recipe, distillation = Recipe(scale=SCALES["smoke"]), DistillationSchedule(parent="p", placement="4xLSLGo")
    recipes = [
        from_parent(recipe, schedule) for schedule in (distillation, replace(distillation, linear_fit_tokens=99))
    ]
    for name, num_ids in (("SM+R", 1), ("SM+ScFuFFN", 2)):
        assert (
            len({candidate_id(Candidate(architecture=sized(name), recipe=variant)) for variant in recipes}) == num_ids
        )
