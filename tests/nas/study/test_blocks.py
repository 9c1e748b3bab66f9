import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from costmodel.cost import Budget
from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from nas.conversion.parent import Parent
from nas.conversion.pretrained import Pretrained
from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.model.decoder import Decoder, build
from nas.model.norms import frozen_norms
from nas.model.weights import deployed_weights, load_deployed
from nas.recipe.candidate import Candidate, recipe_at
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.recipe import SCALES, from_parent, trained_architecture
from nas.training.batches import train_batch
from nas.training.distillation import library
from nas.training.distillation.blocks import BlockwiseDistillation, distillation_error, trained_block
from nas.training.distillation.library import block_scores, initial_weights, parent_hidden_states, scored_tokens
from nas.training.distillation.sub_layers import (
    BlockScores,
    SubLayer,
    from_csv,
    sub_layers_of,
    to_csv,
    trained_sub_layers,
)
from nas.training.memory import TooLargeError
from search_spaces.architecture import Layer
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_space
from search_spaces.inner import inner_norms
from search_spaces.notation import parse, placement
from search_spaces.optima import stages_of
from search_spaces.space import load_space, with_first_layers
from tests.small_models import LLAMA

LAYERS = [
    Layer(norm1="layernorm", attention="softmax", norm2="layernorm", ffn="gelu"),
    Layer(norm1="frozen-layernorm", attention="softmax-temperature", norm2="layernorm", ffn="leaky-relu"),
    Layer(attention="none", norm2="none", ffn="identity", stabiliser="scaled"),
    Layer(norm1="none", attention="softmax-half", ffn="none"),
]
SETTINGS = BlockwiseDistillation(tokens=1024, batch=2, least_steps=4)
SEQ_LEN = 32


def scored_of(texts: Corpus, parent: Parent) -> torch.Tensor:
    return scored_tokens(texts, SEQ_LEN, parent.model.architecture.vocab_size)


@torch.no_grad()
def error_of(block: Callable[..., tuple[Tensor, ...]], read: Tensor, left: Tensor) -> float:
    return float(distillation_error(block(read, False)[0], read, left))


def test_sub_layers_are_what_a_layer_is_trained_as(parent):
    architecture = parent.model.architecture
    assert sub_layers_of(architecture, 1, LAYERS[1]) == (
        SubLayer(1, "attention", "frozen-layernorm", "softmax"),
        SubLayer(1, "ffn", "layernorm", "relu"),
    )
    assert sub_layers_of(architecture, 0, LAYERS[2]) == (
        SubLayer(0, "attention", "none", "none"),
        SubLayer(0, "ffn", "frozen-layernorm", "fused"),  # a norm that goes is frozen on the way
    )


def test_scores_are_of_the_parent_with_one_sub_layer_replaced(parent, texts):
    scores = block_scores(parent, LAYERS, texts, SETTINGS, seq_len=SEQ_LEN).divergences
    architecture = parent.model.architecture
    assert {half for half, value in scores.items() if value == 0} == {
        half for depth in range(2) for half in sub_layers_of(architecture, depth, LAYERS[0])
    }
    model, tokens = parent.decoder(), scored_of(texts, parent)
    with torch.no_grad():
        predicted = model(tokens).logits.log_softmax(-1)
        setattr(model.layers[1], "attention", None)  # noqa: B010
        without = model(tokens).logits.log_softmax(-1)
    expected = (predicted.exp() * (predicted - without)).sum(-1).mean()
    assert scores[SubLayer(1, "attention", "none", "none")] == pytest.approx(float(expected), rel=1e-3)


def test_with_products_in_bf16_scores_are_nearly_the_same(parent, texts):
    whole, lowered = (
        block_scores(parent, LAYERS, texts, replace(SETTINGS, lowered=lowered), seq_len=SEQ_LEN).divergences
        for lowered in (False, True)
    )
    assert whole.keys() == lowered.keys()
    assert [lowered[of] for of in whole] == pytest.approx(list(whole.values()), rel=0.05, abs=2e-5)
    assert whole != lowered


def test_scores_are_kept_beside_the_corpus(parent, texts):
    shares: list[float] = []
    first = block_scores(parent, LAYERS, texts, SETTINGS, seq_len=SEQ_LEN, on_progress=shares.append)
    assert (shares, shares[-1]) == (sorted(shares), 1.0)
    (path,) = Path(texts.folder).glob("blocks-*.csv")
    again: list[float] = []
    assert block_scores(parent, LAYERS, texts, SETTINGS, seq_len=SEQ_LEN, on_progress=again.append) == first
    assert again == []
    whole = path.read_text()
    path.write_text("\n".join(whole.splitlines()[:3]) + "\n")  # cut off at the end of a line
    assert block_scores(parent, LAYERS, texts, SETTINGS, seq_len=SEQ_LEN) == first
    assert path.read_text() == whole
    path.write_text("depth,part\n1,attention\n")
    with pytest.raises(UserError, match=f"{path.name} must be a table of block scores"):
        block_scores(parent, LAYERS, texts, SETTINGS, seq_len=SEQ_LEN)


def test_layers_that_stay_the_parents_have_their_own_alone(parent, texts):
    architecture = parent.model.architecture
    space = with_first_layers(load_space("tiny"), architecture.layers[:1])
    scores = block_scores(parent, space.layers, texts, SETTINGS, seq_len=SEQ_LEN, first_depth=1)
    assert {half for half in scores.divergences if half.depth == 0} == set(
        sub_layers_of(architecture, 0, architecture.layers[0])
    )
    priced = price_space(space, load_pricer(), 16)
    by_layer = scores.by_layer(stages_of(within_budget(priced, Budget(latency_s=99.0))), architecture)
    assert not by_layer[:, 0].any()
    assert (by_layer[:, 1] > 0).sum() == sum(
        scores.divergences[half] > 0 for layer in space.layers for half in sub_layers_of(architecture, 1, layer)
    )


def test_scores_are_finite_and_of_known_parts_and_steps_as_many_at_any_length():
    with pytest.raises(UserError, match="must be a table of block scores, but: 'mlp'"):
        from_csv("depth,part,norm,form,kl_nats\n0,mlp,none,none,0.0\n", "x")
    with pytest.raises(UserError, match="must be finite"):
        BlockScores(divergences={SubLayer(0, "ffn", "none", "none"): math.nan})
    settings = BlockwiseDistillation()
    sizes = [(settings.num_steps(length), settings.batch_of(length)) for length in (32, 128, 512, 1024, 2048)]
    assert sizes == [(128, 8), (32, 8), (32, 2), (32, 1), (32, 1)]


def test_a_candidate_starts_from_linears_that_are_nearest_to_its_parents_ffns(parent, texts):
    recipe = from_parent(
        recipe_at("smoke", "", entropy_regularised=False), DistillationSchedule(parent="p", placement="2xLSLGo")
    )
    made = Candidate(architecture=parse("2xLSLFo", BASES["tiny"]).architecture, recipe=recipe)
    read_stream, left, *_ = parent.decoder().hidden_states(scored_of(texts, parent))
    product = transferred(parent.model.architecture, parent.model.weights, made.initial_architecture)
    errors = []
    for weights in (product, parent.start(made, texts)):
        model = Decoder(made.initial_architecture)
        load_deployed(model, weights)
        errors.append(error_of(model.layers[0], read_stream, left))
    assert errors[1] < 0.7 * errors[0]


def test_a_wider_parent_whose_form_stays_gets_a_lower_rate(parent):
    wide = replace(parent.model.architecture, d_model=768, num_heads=12, head_size=64, d_ff=3072)
    wide = parent._replace(model=parent.model._replace(architecture=wide))
    frozen, gone, linear = (
        SubLayer(0, "ffn", *choice)
        for choice in (("frozen-layernorm", "gelu"), ("none", "gelu"), ("frozen-layernorm", "fused"))
    )
    rates = [[SETTINGS.rate_of(each, made) for made in (frozen, gone, linear)] for each in (parent, wide)]
    assert rates == [[1e-3, 1e-3, 1e-3], [1.25e-4, 1e-3, 1e-3]]


@pytest.mark.parametrize(("part", "form"), [("ffn", "bilinear"), ("attention", "power8")])
def test_a_sub_layer_that_is_fitted_starts_nearest_to_the_parents(part, form, parent, texts):
    weights = {name: value * (8 if "qkv" in name else 1) for name, value in parent.model.weights.items()}
    parent = parent._replace(model=parent.model._replace(weights=weights))
    base, still = parent.model.architecture, replace(SETTINGS, learning_rate=0.0, power8_rate=0.0)
    target = replace(base, layers=(replace(base.layers[0], **{part: form}), base.layers[1]))
    started = Decoder(target)
    load_deployed(started, transferred(base, parent.model.weights, target))
    ((_, hidden_states),) = parent_hidden_states(parent, (0,), texts, still, seq_len=SEQ_LEN)
    fitted = trained_block(parent, SubLayer(0, part, "layernorm", form), hidden_states, still)
    start, end = (
        error_of(block, hidden_states.read[0], hidden_states.left[0]) for block in (started.layers[0], fitted)
    )
    assert end < 0.9 * start


def test_frozen_inner_norms_are_trained_scored_and_kept(texts):
    layer = replace(LLAMA.layers[0], ffn="geglu")
    whole = replace(LLAMA, block="gemma3", head_size=8, vocab_size=512, context=64, layers=(layer,) * 2)
    base = trained_architecture(whole, SCALES["smoke"])
    weights = deployed_weights(build(base, torch.Generator().manual_seed(5)))
    weights |= {name: value * 4 for name, value in weights.items() if name.endswith("attention.norm.weight")}
    parent = Parent("made", Pretrained(base, weights, None), "gemma3")
    own, empty = base.layers[0], Layer(attention="none", ffn="none")
    frozen = replace(own, inner1="frozen", inner2="frozen")
    scores = block_scores(parent, [own, frozen, empty], texts, SETTINGS, seq_len=SEQ_LEN, keep=True)
    for made in sub_layers_of(base, 1, frozen):
        assert made.inner == "frozen"
        assert 0 < scores.divergences[made] < scores.divergences[SubLayer(1, made.part, "none", "none")]
    assert from_csv(to_csv(scores), "it") == scores
    candidate = Candidate(
        architecture=replace(whole, layers=(own, frozen)),
        recipe=from_parent(
            recipe_at("smoke", "", entropy_regularised=False),
            DistillationSchedule(parent="gemma3", placement=placement(base), blockwise_tokens=SETTINGS.tokens),
        ),
    )
    model = Decoder(candidate.initial_architecture)
    load_deployed(model, initial_weights(parent, candidate, texts))
    norms = frozen_norms(model)
    assert sorted(norms) == [f"layers.1.{name}" for name in sorted(inner_norms(base, own))]
    assert all(norm.is_frozen for norm in norms.values())


def test_streams_of_layers_are_those_of_the_whole_parent(parent, texts):
    streams_by_depth = {
        depth: [stream.clone() for stream in hidden_states]
        for depth, hidden_states in parent_hidden_states(parent, (0, 1), texts, SETTINGS, seq_len=SEQ_LEN)
    }
    inputs, _ = train_batch(texts, step=3, batch=2, seq_len=SEQ_LEN, seed=0)
    expected = parent.decoder().hidden_states(inputs)
    for depth in (0, 1):
        read, left = (stream[3] for stream in streams_by_depth[depth])
        assert read.equal(expected[depth])
        assert left.equal(expected[depth + 1])


def test_a_large_stream_is_in_a_file_that_goes(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "MOST_IN_MEMORY", 5)
    made = library.allocate_buffer((2, 3), tmp_path)
    made.copy_(torch.arange(6.0).view(2, 3))
    assert made.sum() == 15
    assert not list(tmp_path.iterdir())


def test_a_library_that_was_killed_goes_on_with_the_layer_it_was_at(parent, texts, monkeypatch):
    whole = block_scores(parent, LAYERS, texts, SETTINGS, seq_len=SEQ_LEN)
    (path,) = Path(texts.folder).glob("blocks-*.csv")
    path.unlink()
    trained, once = [], trained_block

    def killed(parent, sub_layer, *rest):
        trained.append(sub_layer)
        if sub_layer.depth == 1 and len({half.depth for half in trained}) == 2 and not done:
            raise KeyboardInterrupt
        return once(parent, sub_layer, *rest)

    done: list[bool] = []
    monkeypatch.setattr(library, "trained_block", killed)
    with pytest.raises(KeyboardInterrupt):
        block_scores(parent, LAYERS, texts, SETTINGS, seq_len=SEQ_LEN, keep=True)
    done.append(True)
    trained.clear()
    assert block_scores(parent, LAYERS, texts, SETTINGS, seq_len=SEQ_LEN, keep=True) == whole
    assert {half.depth for half in trained} == {1}
    trained.clear()
    assert block_scores(parent, LAYERS, texts, SETTINGS, seq_len=SEQ_LEN, keep=True) == whole
    assert trained == []


MANY = [
    *LAYERS,
    Layer(norm1="frozen-layernorm", attention="power8", norm2="frozen-layernorm", ffn="relu"),
    Layer(norm1="layernorm", attention="2quad", norm2="none", ffn="bilinear"),
    Layer(norm1="layernorm", attention="softmax", norm2="layernorm", ffn="square"),
]
ROTARY = base_architecture(
    "smollm2-135m", Dimensions(layers=3, heads=4, kv_heads=2, d_model=32, d_ff=64, vocab=512, context=64)
)
GATED = [
    Layer(norm1="rmsnorm", attention="softmax", norm2="frozen-rmsnorm", ffn="fused"),
    Layer(norm1="frozen-rmsnorm", attention="power8", norm2="frozen-rmsnorm", ffn="reglu"),
    Layer(norm1="rmsnorm", attention="softmax-half", norm2="rmsnorm", ffn="quadglu"),
    Layer(attention="none", norm2="none", ffn="bilinear"),
    Layer(norm1="rmsnorm", attention="softmax", ffn="none"),
]


@pytest.mark.parametrize(
    ("architecture", "layers", "at_a_time"),
    [(None, MANY, 1 << 30), (ROTARY, GATED, 1 << 30), pytest.param(None, MANY, 1, marks=pytest.mark.slow)],
)
def test_alternatives_train_together_as_one_after_another(parent, texts, monkeypatch, architecture, layers, at_a_time):
    monkeypatch.setattr(library, "MOST_TOGETHER", at_a_time)
    if architecture is not None:
        weights = deployed_weights(build(architecture, torch.Generator().manual_seed(5)))
        weights = {name: (4 * value if "down" in name else value).detach().clone() for name, value in weights.items()}
        parent = parent._replace(model=parent.model._replace(architecture=architecture, weights=weights))
    scores = []
    for _ in range(2):
        scores.append(block_scores(parent, layers, texts, SETTINGS, seq_len=SEQ_LEN).divergences)
        for path in Path(texts.folder).glob("blocks-*.csv"):
            path.unlink()
        monkeypatch.setattr(library.Library, "_layer_by_layer", library.Library._together)
    alone, together = ([each[half] for half in scores[0]] for each in scores)
    assert len(set(alone)) > 12
    assert alone == pytest.approx(together, rel=1e-2)
    assert spearmanr(alone, together).statistic >= 0.98


def test_memory_that_runs_out_before_a_training_is_told_in_one_line(parent, texts, monkeypatch):
    def exhausted(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(library.Library, "start", exhausted)
    distillation = DistillationSchedule(parent="p", placement="2xLSLGo", blockwise_tokens=4096)
    recipe = from_parent(recipe_at("smoke", "", entropy_regularised=False), distillation)
    with pytest.raises(TooLargeError, match="out of memory on cpu with .* lower `micro_batch`"):
        initial_weights(parent, Candidate(architecture=parse("SM", BASES["tiny"]).architecture, recipe=recipe), texts)


@pytest.mark.parametrize("name", ["1xlSLFo-1xLHLRs", "1xLSLRo-1xLSooo", "1xLTLRo-1xooLGo", "1xLBLGo-1xLSLBo"])
def test_a_candidate_starts_from_trained_sub_layers(parent, texts, name, monkeypatch):
    distillation = DistillationSchedule(parent="p", placement="2xLSLGo", blockwise_tokens=4096)
    recipe = from_parent(recipe_at("smoke", "", entropy_regularised=False), distillation)
    made = Candidate(architecture=parse(name, BASES["tiny"]).architecture, recipe=recipe)
    tokens = scored_of(texts, parent)
    hidden_states = parent.decoder().hidden_states(tokens)
    errors = []
    fitted = parent.start(made, texts)
    monkeypatch.setattr("nas.conversion.parent.fitted_linears", None)  # what is trained by itself is not fitted before
    for weights in (fitted, initial_weights(parent, made, texts)):
        model = Decoder(made.initial_architecture)
        load_deployed(model, weights)
        errors.append([error_of(model.layers[depth], *hidden_states[depth:][:2]) for depth in (0, 1)])
    assert sum(errors[1]) < sum(errors[0])
    assert [after == before for before, after in zip(*errors, strict=True)] == [
        all(
            half in trained_sub_layers(parent.model.architecture)
            for half in trained_sub_layers(made.initial_architecture)
            if half.depth == depth
        )
        for depth in (0, 1)
    ]
