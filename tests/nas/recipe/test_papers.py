"""The papers' recipes, by the numbers printed there."""

import math

import pytest

from nas.recipe.candidate import candidate_at
from nas.recipe.papers import LANGUINI, recipe_for
from nas.training.optimizer import learning_rate
from search_spaces.bases import base_architecture
from search_spaces.notation import parse


def test_codeparrot_at_paper_scale() -> None:
    recipe = recipe_for("paper", "codeparrot:/copy", entropy_regularised=True)
    scale = recipe.scale
    assert scale.batch * scale.seq_len == 65_536
    assert scale.num_steps == pytest.approx(32_000, rel=0.01)
    assert learning_rate(recipe, scale.warmup_steps - 1) == 1e-3
    assert learning_rate(recipe, scale.num_steps) == 0
    assert (recipe.weight_decay, recipe.clip_norm, recipe.data) == (0.1, 1.0, "codeparrot:/copy")
    assert recipe.entropy is not None
    assert recipe.entropy.weight == pytest.approx(0.16, rel=0.03)


def test_languini_at_paper_scale() -> None:
    recipe = recipe_for("paper", "languini", entropy_regularised=False)
    assert recipe == LANGUINI
    assert (recipe.scale.num_steps, recipe.scale.warmup_steps, recipe.scale.seq_len) == (18_265, 200, 512)
    assert learning_rate(recipe, 199) == 6e-4
    assert learning_rate(recipe, recipe.scale.num_steps) == pytest.approx(6e-6)
    assert (recipe.weight_decay, recipe.clip_norm) == (0.0, math.inf)
    assert (recipe.beta1, recipe.beta2) == (0.9, 0.95)


def test_other_data_and_scales_keep_the_scales_own_recipe() -> None:
    assert recipe_for("proxy", "languini", entropy_regularised=False).clip_norm == 1
    assert recipe_for("paper", "books", entropy_regularised=False).scale.seq_len == 128


def test_a_candidate_gets_the_recipe_of_its_data() -> None:
    member = parse("EReg(SM+ScFuFFN)", base_architecture("gpt2-small"))
    candidate = candidate_at(member, "paper", seq_len=None, tokens=1_000_000, data="languini")
    assert candidate.trained.vocab_size == 16_384
    assert candidate.recipe.scale.tokens == 1_000_000
    assert candidate.recipe.entropy is not None
    assert candidate.recipe.entropy.weight == pytest.approx(5e-5 * 128 * 512)
