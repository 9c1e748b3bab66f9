"""Scales, recipes and the names of candidates and trials."""

import math
from dataclasses import replace
from typing import Any

import pytest

from costmodel.errors import UserError
from nas.recipe.candidate import Candidate, candidate_id
from nas.recipe.recipe import SCALES, EntropyRegularisation, Recipe, Scale, trained_architecture
from search_spaces.bases import BASES
from search_spaces.notation import parse
from tests.imports import loaded_by

GPT2 = BASES["gpt2-small"]


def candidate(name: str = "SM+ScFuFFN", **recipe) -> Candidate:
    return Candidate(architecture=parse(name, GPT2).architecture, recipe=Recipe(**recipe))


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
@pytest.mark.parametrize("base", ["gpt2-small", "pythia-70m"])
def test_a_scale_changes_size_and_nothing_else(scale: Scale, base: str) -> None:
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


def test_rungs_end_with_the_last_step_and_are_distinct() -> None:
    for scale in SCALES.values():
        assert scale.rung_steps[-1] == scale.num_steps
        assert len(scale.rung_steps) == len(scale.rungs)
    short = replace(SCALES["smoke"], tokens=256, rungs=(0.1, 0.2, 1.0))
    assert short.num_steps == 1
    assert short.rung_steps == (1,)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"tokens": 0}, "`tokens` of a scale must be at least 1"),
        ({"batch": 3, "micro_batch": 2}, "`micro_batch` must divide `batch`"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be positive"),
        ({"warmup_share": 1.0}, "`warmup_share`"),
        ({"rungs": (0.5, 0.25, 1.0)}, "`rungs` must rise"),
        ({"rungs": (0.5,)}, "`rungs` must rise"),
        ({"rungs": ()}, "`rungs` must rise"),
        ({"head_dim": 10**30}, "`head_dim` of a scale must be at least 1 and at most 268435456"),
        ({"vocab_size": 10**30}, "`vocab_size` of a scale must be at least 1 and at most 268435456"),
        ({"tokens": 10**30}, "`tokens` of a scale must be at least 1 and at most 9223372036854775807"),
        ({"learning_rate": float("inf")}, "`learning_rate` must be positive and finite"),
    ],
)
def test_impossible_scales_are_refused(changes: dict, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(SCALES["smoke"], **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("clip_norm", 0.0), ("beta1", 1.0), ("beta2", 1.5), ("weight_decay", -1.0), ("eps", math.nan)),
        *((name, math.inf) for name in ("eps", "temperature_init", "weight_decay")),
    ],
)
def test_impossible_recipes_are_refused(name: str, value: float) -> None:
    changes: Any = {name: value}
    with pytest.raises(UserError, match=f"`{name}` .*but got {value}"):
        Recipe(**changes)


def test_a_context_shorter_than_the_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="context must cover"):
        trained_architecture(replace(GPT2, context=64), SCALES["paper"])


def test_ids_tell_architecture_and_recipe_apart_and_nothing_else() -> None:
    plain = candidate()
    assert candidate_id(plain) == candidate_id(candidate())
    regularised = candidate(entropy=EntropyRegularisation())
    longer = candidate(scale=replace(SCALES["proxy"], tokens=10_000_000))
    others = [regularised, longer, candidate("SM+ScFuFFN_i6")]
    assert len({candidate_id(variant) for variant in [plain, *others]}) == 4


def test_names_say_whether_entropy_is_regularised() -> None:
    assert candidate("SM(t)+ScFuFFN_i6").name == "SM(t)+ScFuFFN_i6"
    assert candidate(entropy=EntropyRegularisation()).name == "EReg(SM+ScFuFFN)"


def test_candidates_and_data_need_no_torch() -> None:
    assert "torch" not in loaded_by("import nas.recipe.candidate, nas.training.outcome, nas.corpus.corpus")


def test_a_model_wider_than_a_tensor_is_not_trained() -> None:
    wide = replace(GPT2, d_ff=10**30)
    with pytest.raises(UserError, match="`d_ff` of a model to train must be at most 268435456"):
        trained_architecture(wide, SCALES["paper"])
