"""Scores of sub-layers: against the parent with that sub-layer replaced by hand; and what is kept of them."""

import math
from pathlib import Path

import pytest
import torch

from costmodel.errors import UserError
from nas.conversion.linear_fit import streams_of
from nas.conversion.parent import Parent, load_parent
from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus, prepare
from nas.model.decoder import Decoder
from nas.model.weights import load_deployed
from nas.recipe.candidate import Candidate
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.papers import recipe_for
from nas.recipe.recipe import from_parent
from nas.searchers.block_scores import BlockScores, SubLayer, from_csv, sub_layers_of, to_csv
from nas.study.blocks import block_scores, scored_tokens
from nas.study.library import BlockwiseDistillation, distillation_error, trained_blocks
from search_spaces.architecture import Layer
from search_spaces.bases import BASES
from search_spaces.notation import parse
from tests.nas.study.conftest import untrained_parent

LAYERS = [
    Layer(norm1="layernorm", attention="softmax", norm2="layernorm", ffn="gelu"),
    Layer(norm1="frozen-layernorm", attention="softmax-temperature", norm2="layernorm", ffn="leaky-relu"),
    Layer(attention="none", norm2="none", ffn="identity", stabiliser="scaled"),
    Layer(norm1="none", attention="softmax-half", ffn="none"),
]
SETTINGS = BlockwiseDistillation(tokens=1024, batch=2, least_steps=4)
SEQ_LEN = 32


@pytest.fixture
def corpus(source_files: str) -> Corpus:
    return prepare(source_files, vocab_size=512)


@pytest.fixture
def parent(corpus: Corpus) -> Parent:
    """A model of random weights that are far from 0, so that every sub-layer of it matters."""
    return untrained_parent(corpus, output_scale=4.0)


def test_sub_layers_are_what_a_layer_is_trained_as(parent: Parent):
    own = parent.model.architecture
    assert sub_layers_of(own, 1, LAYERS[1]) == (
        SubLayer(1, "attention", "frozen-layernorm", "softmax"),
        SubLayer(1, "ffn", "layernorm", "relu"),
    )
    assert sub_layers_of(own, 0, LAYERS[2]) == (
        SubLayer(0, "attention", "none", "none"),
        SubLayer(0, "ffn", "frozen-layernorm", "fused"),  # a norm that goes is frozen on the way
    )


def test_scores_are_of_the_parent_with_one_sub_layer_replaced(parent: Parent, corpus: Corpus):
    scores = block_scores(parent, LAYERS, corpus, SETTINGS, seq_len=SEQ_LEN).divergences
    own = parent.model.architecture
    assert {half for half, value in scores.items() if value == 0} == {
        half for depth in range(2) for half in sub_layers_of(own, depth, LAYERS[0])
    }
    model, tokens = parent.decoder(), scored_tokens(corpus, own.context)
    with torch.no_grad():
        predicted = model(tokens).logits.log_softmax(-1)
        setattr(model.layers[1], "attention", None)  # noqa: B010
        without = model(tokens).logits.log_softmax(-1)
    expected = (predicted.exp() * (predicted - without)).sum(-1).mean()
    assert scores[SubLayer(1, "attention", "none", "none")] == pytest.approx(float(expected), rel=1e-3)


def test_training_brings_alternatives_nearer_to_the_parents_layer(parent: Parent, corpus: Corpus):
    half = SubLayer(0, "ffn", "layernorm", "relu")
    tokens = scored_tokens(corpus, parent.model.architecture.context)
    read_stream, left, *_ = streams_of(parent.decoder(), tokens)
    errors = []
    for rate in (0.0, 1e-3):
        settings = BlockwiseDistillation(tokens=16_384, batch=4, learning_rate=rate)
        (trained,) = trained_blocks(
            parent, [half], corpus, settings, seq_len=SEQ_LEN, then=lambda _, block: block.requires_grad_(False)
        )
        made, _ = trained[half](read_stream, False)
        errors.append(float(distillation_error(made, read_stream, left)))
    assert errors[1] < 0.9 * errors[0]


def test_a_linear_in_place_of_an_ffn_is_better_than_none(parent: Parent, corpus: Corpus):
    scores = block_scores(parent, LAYERS, corpus, SETTINGS, seq_len=SEQ_LEN).divergences
    for depth in range(2):
        assert (
            scores[SubLayer(depth, "ffn", "frozen-layernorm", "fused")] < scores[SubLayer(depth, "ffn", "none", "none")]
        )


def test_scores_are_kept_beside_the_corpus(parent: Parent, corpus: Corpus):
    shares: list[float] = []
    first = block_scores(parent, LAYERS, corpus, SETTINGS, seq_len=SEQ_LEN, on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    (path,) = Path(corpus.folder).glob("blocks-*.csv")
    again: list[float] = []
    assert block_scores(parent, LAYERS, corpus, SETTINGS, seq_len=SEQ_LEN, on_progress=again.append) == first
    assert again == []
    whole = path.read_text()
    path.write_text("\n".join(whole.splitlines()[:3]) + "\n")  # cut off at the end of a line
    assert block_scores(parent, LAYERS, corpus, SETTINGS, seq_len=SEQ_LEN) == first
    assert path.read_text() == whole
    path.write_text("depth,part\n1,attention\n")
    with pytest.raises(UserError, match=f"{path.name} must be a table of block scores"):
        block_scores(parent, LAYERS, corpus, SETTINGS, seq_len=SEQ_LEN)


def test_a_table_is_read_as_it_was_written():
    scores = BlockScores(
        divergences={SubLayer(3, "ffn", "none", "none"): 0.1 + 0.2, SubLayer(0, "attention", "n", "f"): 0.0}
    )
    assert from_csv(to_csv(scores), "x") == scores


def test_a_table_with_another_part_is_refused():
    with pytest.raises(UserError, match="must be a table of block scores, but: 'mlp'"):
        from_csv("depth,part,norm,form,kl_nats\n0,mlp,none,none,0.0\n", "x")


def test_a_score_that_is_not_finite_is_refused():
    with pytest.raises(UserError, match="must be finite"):
        BlockScores(divergences={SubLayer(0, "ffn", "none", "none"): math.nan})


def test_the_builtin_parents_halves_have_places_in_its_own_space():
    own = load_parent("builtin").model.architecture
    assert {half.depth for layer in LAYERS for depth in range(12) for half in sub_layers_of(own, depth, layer)} == set(
        range(12)
    )


def test_a_candidate_starts_from_linears_that_are_nearest_to_its_parents_ffns(parent: Parent, corpus: Corpus):
    recipe = from_parent(
        recipe_for("smoke", "", entropy_regularised=False), DistillationSchedule(parent="p", placement="2xLSLGo")
    )
    made = Candidate(architecture=parse("2xLSLFo", BASES["tiny"]).architecture, recipe=recipe)
    read_stream, left, *_ = streams_of(parent.decoder(), scored_tokens(corpus, parent.model.architecture.context))
    product = transferred(parent.model.architecture, parent.model.weights, made.initial_architecture)
    errors = []
    for weights in (product, parent.start(made, corpus)):
        model = Decoder(made.initial_architecture)
        load_deployed(model, weights)
        with torch.no_grad():
            errors.append(float(distillation_error(model.layers[0](read_stream, False)[0], read_stream, left)))
    assert errors[1] < 0.7 * errors[0]
