import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.errors import UserError
from nas import search, train
from nas.recipe.candidate import LANGUINI, Candidate, candidate_at, candidate_id, recipe_at, trial_id
from nas.recipe.distillation import (
    DistillationSchedule,
    Part,
    fitted_parts,
    initial_architecture,
    removed_parts,
    student_architecture,
)
from nas.recipe.overrides import EntropyChanges, FoldableChanges, RecipeChanges, ScaleChanges, changed
from nas.recipe.recipe import SCALES, EntropyRegularisation, Foldable, Recipe, from_parent, trained_architecture
from nas.training.optimizer import learning_rate
from search_spaces.architecture import Architecture, default_final_norm
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.deployed import deployed
from search_spaces.forms import Attention, Ffn, Norm
from search_spaces.notation import parse, placement
from tests.search_spaces.conftest import drawn_layers

GPT2 = BASES["gpt2-small"]


def candidate(name: str = "SM+ScFuFFN", **recipe) -> Candidate:
    return Candidate(architecture=parse(name, GPT2).architecture, recipe=Recipe(**recipe))


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
@pytest.mark.parametrize("base", ["gpt2-small", "pythia-70m"])
def test_a_scale_changes_size_and_nothing_else(scale, base):
    architecture = BASES[base]
    trained = trained_architecture(architecture, scale)
    assert trained.layers == architecture.layers
    assert (trained.block, trained.num_heads) == (architecture.block, architecture.num_heads)
    assert trained.d_ff == 4 * trained.d_model
    assert trained.context >= scale.seq_len
    if scale.name in ("paper", "parent"):
        assert trained == architecture
    else:
        assert trained.d_model == architecture.num_heads * scale.head_dim


def test_rungs_end_with_the_last_step_and_are_distinct():
    for scale in SCALES.values():
        assert (scale.rung_steps[-1], len(scale.rung_steps)) == (scale.num_steps, len(scale.rungs))
    short = replace(SCALES["smoke"], tokens=256, rungs=(0.1, 0.2, 1.0))
    assert (short.num_steps, short.rung_steps) == (1, (1,))


def scaled(**changes):
    return lambda: replace(SCALES["smoke"], **changes)


def schedule(**changes):
    return lambda: DistillationSchedule(parent="p", placement="4xLSLGo", **changes)


def trial(seed, attempt):
    member = parse("SM", base_architecture("tiny"))
    return lambda: trial_id(candidate_at(member, "smoke", data="stdlib"), seed=seed, attempt=attempt)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (scaled(tokens=0), "`tokens` of a scale must be at least 1"),
        (scaled(batch=3, micro_batch=2), "`micro_batch` must divide `batch`"),
        (scaled(learning_rate=math.nan), "`learning_rate` must be positive"),
        (scaled(learning_rate=math.inf), "`learning_rate` must be positive and finite"),
        (scaled(warmup_share=1.0), "`warmup_share`"),
        *((scaled(rungs=rungs), "`rungs` must rise") for rungs in ((0.5, 0.25, 1.0), (0.5,), ())),
        (scaled(head_dim=10**30), "`head_dim` of a scale must be at least 1 and at most 268435456"),
        (scaled(vocab_size=10**30), "`vocab_size` of a scale must be at least 1 and at most 268435456"),
        (scaled(tokens=10**30), "`tokens` of a scale must be at least 1 and at most 9223372036854775807"),
        (lambda: Recipe(clip_norm=0.0), "`clip_norm` .*but got 0.0"),
        (lambda: Recipe(beta1=1.0), "`beta1` .*but got 1.0"),
        (lambda: Recipe(beta2=1.5), "`beta2` .*but got 1.5"),
        (lambda: Recipe(weight_decay=-1.0), "`weight_decay` .*but got -1.0"),
        (lambda: Recipe(weight_decay=math.inf), "`weight_decay` .*but got inf"),
        (lambda: Recipe(eps=math.nan), "`eps` .*but got nan"),
        (lambda: Recipe(eps=math.inf), "`eps` .*but got inf"),
        (lambda: Recipe(temperature_init=math.inf), "`temperature_init` .*but got inf"),
        (lambda: trained_architecture(replace(GPT2, context=64), SCALES["paper"]), "context must cover"),
        (
            lambda: trained_architecture(replace(GPT2, d_ff=10**30), SCALES["paper"]),
            "`d_ff` of a model to train must be at most 268435456",
        ),
        *(
            (
                schedule(start_share=start, end_share=end),
                "a distillation schedule needs 0 <= `start_share` < `end_share`",
            )
            for start, end in ((0.5, 0.5), (-0.1, 0.4), (0.5, 1.1), (math.nan, 0.5))
        ),
        (schedule(prediction_weight=1.5), "`prediction_weight` of a schedule must be from 0 to 1, but got 1.5"),
        (schedule(linear_fit_tokens=0), "`linear_fit_tokens` of a schedule must be at least 1"),
        (trial(-1, 0), "must not be negative"),
        (trial(0, -1), "must not be negative"),
        (
            lambda: changed(Recipe(), RecipeChanges(entropy=EntropyChanges(margin=0.1))),
            r"\(margin\) need an architecture named EReg",
        ),
        (lambda: changed(Recipe(), RecipeChanges(scale=ScaleChanges(micro_batch=3))), "`micro_batch` must divide `bat"),
    ],
)
def test_impossible_recipes_are_refused(make, rule):
    with pytest.raises(UserError, match=rule):
        make()


def test_ids_tell_architecture_and_recipe_apart_and_names_regularisation():
    plain = candidate()
    assert candidate_id(plain) == candidate_id(candidate())
    regularised = candidate(entropy=EntropyRegularisation())
    longer = candidate(scale=replace(SCALES["proxy"], tokens=10_000_000))
    others = [regularised, longer, candidate("SM+ScFuFFN_i6")]
    assert len({candidate_id(variant) for variant in [plain, *others]}) == 4
    assert candidate("SM(t)+ScFuFFN_i6").name == "SM(t)+ScFuFFN_i6"
    assert candidate(entropy=EntropyRegularisation()).name == "EReg(SM+ScFuFFN)"


@pytest.mark.parametrize("command", [search, train])
def test_the_recipe_has_one_entry_in_the_help_and_a_list_of_its_own(command, capsys):
    for flag, shown in (("--help", False), ("--recipe.help", True)):
        with pytest.raises(SystemExit, match="^0$"):
            command.parse([flag]) if command is search else command.main([flag])
        text = capsys.readouterr().out
        assert ("--recipe.scale.learning-rate" in text) is shown
        assert ("--recipe.precision VALUE" in text) is shown
        assert ("Without a flag, a part has the value of the recipe" in text) is shown
        assert "--recipe.scale VALUE" not in text  # a group of flags
        assert ("--recipe.help" in text) is not shown


def test_codeparrot_and_languini_at_paper_scale():
    recipe = recipe_at("paper", "codeparrot:/copy", entropy_regularised=True)
    scale = recipe.scale
    assert scale.batch * scale.seq_len == 65_536
    assert scale.num_steps == pytest.approx(32_000, rel=0.01)
    assert learning_rate(recipe, scale.warmup_steps - 1) == 1e-3
    assert learning_rate(recipe, scale.num_steps) == 0
    assert (recipe.weight_decay, recipe.clip_norm, recipe.data) == (0.1, 1.0, "codeparrot:/copy")
    assert recipe.entropy.weight == pytest.approx(0.16, rel=0.03)
    recipe = recipe_at("paper", "languini", entropy_regularised=False)
    assert recipe == LANGUINI
    assert (recipe.scale.num_steps, recipe.scale.warmup_steps, recipe.scale.seq_len) == (18_265, 200, 512)
    assert learning_rate(recipe, 199) == 6e-4
    assert learning_rate(recipe, recipe.scale.num_steps) == pytest.approx(6e-6)
    assert (recipe.weight_decay, recipe.clip_norm) == (0.0, math.inf)
    assert (recipe.beta1, recipe.beta2) == (0.9, 0.95)


def test_a_candidate_gets_the_recipe_of_its_data_at_paper_scale_alone():
    assert recipe_at("proxy", "languini", entropy_regularised=False).clip_norm == 1
    assert recipe_at("paper", "books", entropy_regularised=False).scale.seq_len == 128
    member = parse("EReg(SM+ScFuFFN)", base_architecture("gpt2-small"))
    candidate = candidate_at(member, "paper", seq_len=None, tokens=1_000_000, data="languini")
    assert (candidate.trained.vocab_size, candidate.recipe.scale.tokens) == (16_384, 1_000_000)
    assert candidate.recipe.entropy.weight == pytest.approx(5e-5 * 128 * 512)


@pytest.mark.parametrize(
    ("name", "scale", "data", "expected"),
    [
        ("SM+LN+G", "proxy", "stdlib", "d245ef09f234"),
        ("EReg(SM(t)+ScFuFFN_i6)", "proxy", "stdlib", "aa10b3f57313"),
        ("EReg(SM(t)+ScFuFFN)", "paper", "languini", "9a68ce2f740d"),
    ],
)
def test_golden_ids(name, scale, data, expected):
    """A new field must not change them: it is left out of the canonical form where it has its default."""
    member = parse(name, base_architecture("gpt2-small"))
    candidate = candidate_at(member, scale, seq_len=None, tokens=None, data=data)
    assert candidate_id(candidate) == expected
    assert trial_id(candidate, seed=3, attempt=1) == f"{expected}-s3-a1"


@pytest.mark.parametrize(
    "stated", [{"parent": "q"}, {"teacher_top_k": 64}, {"trainable": "changed"}, {"blockwise_tokens": 1024}]
)
def test_what_a_schedule_states_beyond_its_defaults_makes_another_candidate(stated):
    member = parse("SM+R", base_architecture("gpt2-small"))
    distillation = DistillationSchedule(parent="p", placement="12xLSLGo")
    ids = [
        candidate_id(candidate_at(member, "proxy", data="stdlib", distillation=made))
        for made in (distillation, replace(distillation, **stated))
    ]
    assert ids[0] == "0fbaa18397f9"
    assert ids[1] != ids[0]


REGULARISED = Recipe(entropy=EntropyRegularisation())


def test_every_change_lands_where_it_belongs():
    entropy = EntropyChanges(form="published-code", weight=0.0)
    changes = RecipeChanges(scale=ScaleChanges(learning_rate=0.5), entropy=entropy, weight_decay=0.0, schedule="linear")
    made = changed(REGULARISED, changes)
    assert (made.scale.learning_rate, made.entropy.form, made.entropy.weight) == (0.5, "published-code", 0.0)
    assert (made.weight_decay, made.schedule) == (0.0, "linear")
    assert (made.beta2, made.scale.batch) == (REGULARISED.beta2, REGULARISED.scale.batch)
    made = changed(Recipe(), RecipeChanges(foldable=FoldableChanges(floor=0.3)))
    assert made.foldable == Foldable(floor=0.3)
    assert changed(made, RecipeChanges(foldable=FoldableChanges(every=4))).foldable == Foldable(floor=0.3, every=4)


PARENT = parse("SM+LN+G", base_architecture("tiny", Dimensions(layers=4))).architecture
NORMS: tuple[Norm, ...] = ("layernorm", "frozen-layernorm", "frozen-rmsnorm", "none")
ATTENTIONS: tuple[Attention, ...] = ("softmax", "softmax-temperature", "softmax-half", "2quad", "power8", "none")
FFNS: tuple[Ffn, ...] = ("gelu", "relu", "leaky-relu", "square", "identity", "fused", "none")


@st.composite
def targets(draw: st.DrawFn) -> Architecture:
    placed = tuple(draw(st.lists(drawn_layers(NORMS, ATTENTIONS, FFNS), min_size=4, max_size=4)))
    return replace(PARENT, layers=placed, final_norm=default_final_norm(placed))


def sized(name: str) -> Architecture:
    return parse(name, PARENT).architecture


@given(targets())
def test_what_is_trained_deploys_as_the_target_with_norms_and_begins_with_all_of_the_parent(target):
    trained = student_architecture(target, PARENT, spread=True)
    assert deployed(trained) == deployed(target)
    assert all(layer.norm1 != "none" for layer in trained.layers if layer.attention != "none")
    assert all(layer.norm2 != "none" for layer in trained.layers if layer.ffn != "none")
    assert student_architecture(trained, PARENT, spread=True) == trained
    begun = initial_architecture(trained, PARENT)
    assert list(removed_parts(begun, PARENT)) == []
    assert all(layer.attention != "none" for layer in begun.layers)
    assert all(layer.ffn not in ("none", "identity") for layer in begun.layers)


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


def test_the_removed_parts_by_layer_and_a_parent_without_norms_gives_none():
    trained = student_architecture(sized("1xooLRo-1xoSooo-1xlSlIs-1xLSLGo"), PARENT, spread=True)
    assert list(removed_parts(trained, PARENT)) == [Part(0, "attention"), Part(1, "ffn")]
    assert fitted_parts(trained, PARENT) == [Part(2, "ffn")]
    assert placement(trained) == "1xooLRo-1xlSooo-1xlSlFs-1xLSLGo"
    assert placement(initial_architecture(trained, PARENT)) == "1xLSLRo-1xlSLGo-1xlSlFs-1xLSLGo"
    parent = sized("SM+G")
    assert student_architecture(sized("SM+R"), parent, spread=True) == sized("SM+R")


def test_gates_fall_from_one_to_nothing_between_their_shares():
    distillation = DistillationSchedule(parent="p", placement="4xLSLGo", start_share=0.25, end_share=0.75)
    assert [distillation.gate_at(step, 16) for step in (0, 4, 6, 8, 10, 12, 16)] == [1, 1, 0.75, 0.5, 0.25, 0, 0]


@pytest.mark.parametrize("scale", ["proxy", "parent"])
@pytest.mark.parametrize(("distillation", "streams"), [(0.95, 10.0), (0.0, 0.0)])
def test_a_schedule_without_predictions_uses_no_hidden_states(scale, distillation, streams):
    distillation = DistillationSchedule(parent="p", placement="4xLSLGo", prediction_weight=distillation)
    taught = from_parent(Recipe(scale=SCALES[scale]), distillation).distillation
    assert taught.hidden_state_weight == streams


@pytest.mark.parametrize(("seq_len", "batch"), [(None, 4), (200, 2), (512, 1), (1024, 1)])
def test_at_scale_parent_the_length_of_a_sequence_decides_how_many_a_step_has(seq_len, batch):
    scale = recipe_at("parent", "stdlib", entropy_regularised=False, seq_len=seq_len).scale
    assert (scale.batch, scale.micro_batch) == (batch, batch)


def test_at_scale_parent_the_rate_is_in_proportion_to_the_weights_of_the_parent():
    schedules = [DistillationSchedule(parent="p", placement="4xLSLGo", weight_rms=rms) for rms in (0.193, 0.0344)]
    recipes = [recipe_at("parent", "stdlib", entropy_regularised=False, distillation=each) for each in schedules]
    assert [recipe.scale.learning_rate for recipe in recipes] == [5.0e-5, 8.9e-6]
    others = [from_parent(Recipe(scale=SCALES["smoke"]), each) for each in schedules]
    assert len({candidate_id(Candidate(architecture=sized("SM+R"), recipe=recipe)) for recipe in others}) == 1


def test_a_linear_fit_is_a_part_of_those_candidates_that_have_one():
    recipe, distillation = Recipe(scale=SCALES["smoke"]), DistillationSchedule(parent="p", placement="4xLSLGo")
    recipes = [
        from_parent(recipe, schedule) for schedule in (distillation, replace(distillation, linear_fit_tokens=99))
    ]
    for name, num_ids in (("SM+R", 1), ("SM+ScFuFFN", 2)):
        assert (
            len({candidate_id(Candidate(architecture=sized(name), recipe=variant)) for variant in recipes}) == num_ids
        )
