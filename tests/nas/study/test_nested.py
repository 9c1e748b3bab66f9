"""Weights from one training that any placement is cut from."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.model.cross_entropy import Distilled
from nas.model.decoder import Decoder
from nas.recipe.papers import recipe_for
from nas.recipe.recipe import Recipe, from_parent
from nas.study import nested
from nas.study.nested import Nested, can_nest, forms_of, nested_training
from nas.training.batches import Validation, train_batch, validate
from nas.training.distillation.teacher import Teacher
from search_spaces.architecture import Architecture, Layer
from search_spaces.notation import parse

LAYERS = [
    Layer(norm1="layernorm", attention="softmax-temperature", norm2="layernorm", ffn="gelu"),
    Layer(norm1="none", attention="softmax-half", norm2="frozen-layernorm", ffn="leaky-relu"),
    Layer(attention="none", ffn="identity"),
    Layer(attention="none", ffn="none"),
]
STEPS = 5


@pytest.fixture
def recipe(parent: Parent) -> Recipe:
    recipe = from_parent(recipe_for("smoke", "", entropy_regularised=False), parent.route)
    return replace(recipe, scale=replace(recipe.scale, seq_len=32, batch=2, micro_batch=2))


def trained(parent: Parent, texts: Corpus, recipe: Recipe) -> Nested:
    teacher = Teacher(parent.decoder(), most_likely=16)
    return nested_training(parent, LAYERS, texts, recipe, teacher, tokens=STEPS * 64)


def placement(parent: Parent, notation: str) -> Architecture:
    return replace(parse(notation, parent.model.architecture).architecture, context=32)


def test_forms_are_what_layers_start_as_and_every_norm_that_goes_is_frozen(parent: Parent):
    assert forms_of(LAYERS, parent.model.architecture) == (
        ("frozen-layernorm", "layernorm"),
        ("none", "softmax", "softmax-half"),
        ("fused", "gelu", "none", "relu"),
    )


def test_weights_are_shared_where_parts_of_the_parent_are_of_live_norms_and_softmax(parent: Parent):
    own = parent.model.architecture
    assert can_nest(own)
    for other in ("2xLSLWo", "2xlSLGo", "2xLTLGo", "1xLSLGo-1xLSLGs", "1xLSLGo-1xooLGo"):
        assert not can_nest(parse(other, own).architecture), other
    assert not can_nest(replace(own, block="sas", final_norm="layernorm", tied_embeddings=False))


def test_the_parent_cut_from_its_own_weights_is_the_parent(parent: Parent, texts: Corpus, recipe: Recipe):
    own = placement(parent, "2xLSLGo")
    loss = validate(parent.decoder(), texts, recipe.scale, recipe.scale.rung_validation_tokens).loss
    assert Nested(parent.model.architecture, parent.model.weights, texts, recipe).loss(own) == pytest.approx(loss)


def test_frozen_norms_of_a_cut_divide_by_what_they_read(parent: Parent, texts: Corpus, recipe: Recipe, monkeypatch):
    """Against the deviation of the embeddings, which the first norm reads, but for first positions."""
    seen: list[Decoder] = []

    def validated(model: Decoder, *given: Any) -> Validation:
        seen.append(model)
        return validate(model, *given)

    monkeypatch.setattr(nested, "validate", validated)
    Nested(parent.model.architecture, parent.model.weights, texts, recipe).loss(placement(parent, "2xlSlGo"))
    norm = seen[0].layers[0].norm1
    inputs = torch.cat([train_batch(texts, step=step, batch=1, seq_len=32, seed=0)[0] for step in range(16)])
    rows = parent.decoder().embedded(inputs)[:, 1:]
    assert norm.is_frozen
    torch.testing.assert_close(norm.sigma, rows.var(dim=-1, correction=0).sqrt().mean())


def test_a_step_trains_what_a_drawn_placement_computes(parent: Parent, texts: Corpus, recipe: Recipe, monkeypatch):
    """Every weight that some placement has moves, and placements without a part leave it alone."""
    monkeypatch.setattr(nested, "ANNEALED_SHARE", 1e-9)
    layers: list[tuple[Layer, ...]] = []
    drawn = nested._NestedRun._placement

    def noted(run: nested._NestedRun) -> Architecture:
        placed = drawn(run)
        layers.append(placed.layers)
        return placed

    monkeypatch.setattr(nested._NestedRun, "_placement", noted)
    weights = trained(parent, texts, recipe).weights
    before = parent.model.weights
    for depth in range(2):
        forms = {placed[depth].ffn for placed in layers}
        moved = not torch.equal(weights[f"layers.{depth}.ffn.up.weight"], before[f"layers.{depth}.ffn.up.weight"])
        assert moved == bool(forms & {"gelu", "relu"})
    assert {layer.ffn for placed in layers for layer in placed} > {"relu"}
    assert not torch.equal(weights["embed.weight"], before["embed.weight"])


def test_a_training_that_was_killed_goes_on_to_the_same_weights(
    parent: Parent, texts: Corpus, recipe: Recipe, monkeypatch
):
    monkeypatch.setattr(nested, "STEPS_KEPT", 2)
    whole = trained(parent, texts, recipe).weights
    again = trained(parent, texts, recipe)  # kept beside the texts
    monkeypatch.setattr(nested, "FORMAT", nested.FORMAT + 1)
    step = nested._NestedRun.train_step

    def killed(run: nested._NestedRun) -> None:
        if run.step == 3:
            raise KeyboardInterrupt
        step(run)

    monkeypatch.setattr(nested._NestedRun, "train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(parent, texts, recipe)
    steps: list[int] = []

    def counted(run: nested._NestedRun) -> None:
        steps.append(run.step)
        step(run)

    monkeypatch.setattr(nested._NestedRun, "train_step", counted)
    resumed = trained(parent, texts, recipe).weights
    assert steps == [2, 3, 4]
    for name, value in whole.items():
        assert torch.equal(value, again.weights[name]), name
        assert torch.equal(value, resumed[name]), name


def test_every_placement_of_a_space_can_be_cut(parent: Parent, texts: Corpus, recipe: Recipe):
    weights = trained(parent, texts, recipe)
    for notation in ("1xlTlKs-1xooooo", "1xoooFo-1xLHoRo", "2xlHlFs"):
        loss = weights.loss(placement(parent, notation))
        assert 0 < loss < 20
    with torch.no_grad():  # a decoder of its own, which nothing is left in
        assert isinstance(weights.loss(placement(parent, "2xLSLGo")), float)
        assert Decoder(placement(parent, "2xLSLGo"))


def test_a_placement_that_overflows_moves_nothing(parent: Parent, texts: Corpus, recipe: Recipe, monkeypatch):
    monkeypatch.setattr(nested, "distilled", lambda hidden, *_: Distilled(*[hidden.sum() * math.inf] * 3))
    weights = trained(parent, texts, recipe).weights
    assert torch.equal(weights["embed.weight"], parent.model.weights["embed.weight"])
