"""Models of transformers, tiny and of random weights: the traced graph in the clear is the model, and what it costs."""

from collections import Counter
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from costmodel import ops
from costmodel.deployment.deploy import Deployment, deploy
from costmodel.execution.interpreter import execute, values
from costmodel.ops import RMSNORM_EPSILON, ROTARY_BASE, Node, OpGraph
from costmodel.tracing.trace import trace
from tests.costmodel.kv_cache import kv_cache
from tests.costmodel.tracing.models import (
    HEAD_DIM,
    HEADS,
    MULTIPLIERS,
    SEQ_LEN,
    SIZE,
    VOCAB,
    WIDTH,
    bert,
    clip,
    cohere,
    decoder,
    falcon,
    gemma2,
    gpt2,
    granite,
    llama,
    openai_gpt,
    pythia,
    roberta,
    transformers,
)

MODELS = {
    "gpt2": gpt2,
    "pythia": pythia,
    "llama": llama,
    "llama without shared heads": lambda: llama(num_key_value_heads=HEADS),
    "granite": granite,
    "granite with multipliers": lambda: granite(**MULTIPLIERS),
    "gemma2": gemma2,
    "gemma2, spelled out": lambda: gemma2(attn_implementation="eager"),
    "bert with a pooler": bert,
    "bert, spelled out": lambda: bert(attn_implementation="eager"),
    "bert of masks": lambda: bert("ForMaskedLM"),
    "nemotron": partial(decoder, "Nemotron"),
    "qwen3": partial(decoder, "Qwen3"),
    "olmo2": partial(decoder, "Olmo2", rms_norm_eps=RMSNORM_EPSILON),
    "gemma3": partial(decoder, "Gemma3Text", rope_theta=ROTARY_BASE),
    "phi3": partial(decoder, "Phi3", rms_norm_eps=RMSNORM_EPSILON),
    "phi3, spelled out": partial(decoder, "Phi3", rms_norm_eps=RMSNORM_EPSILON, attn_implementation="eager"),
    "glm": partial(decoder, "Glm", rms_norm_eps=RMSNORM_EPSILON),
    "glm4": partial(decoder, "Glm4", rms_norm_eps=RMSNORM_EPSILON),
    "falcon": falcon,
    "falcon, spelled out": partial(falcon, attn_implementation="eager"),
    "falcon with one norm": partial(falcon, num_ln_in_parallel_attn=1),
    "cohere": cohere,
    "openai gpt": openai_gpt,
    "roberta": roberta,
    "roberta of masks": lambda: roberta("ForMaskedLM"),
    "gpt2 of quick gelus": lambda: gpt2(activation_function="quick_gelu"),
    "clip": clip,
}


@cache
def made(name: str) -> tuple[Any, OpGraph]:
    """A model of random weights, all of them away from 0 and 1, and its traced graph."""
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model, trace(model, SEQ_LEN)


def deployed(model: Any, graph: OpGraph) -> dict[str, np.ndarray]:
    """A model's weights by node and suffix, as the interpreter takes them."""
    state = {name: value.detach().double() for name, value in model.state_dict().items()}
    return {
        f"{node.name}.{suffix}": _weight(model, state, node, suffix, shape).numpy()
        for node in graph
        for suffix, shape in node.op.weight_shapes.items()
    }


def _weight(model: Any, state: dict[str, Any], node: Node, suffix: str, shape: tuple[int, ...]) -> Any:
    if isinstance(node.op, ops.PositionEmbedding):
        return _table(model, state, node.name, shape)
    owner, value = model.get_submodule(node.name), state[f"{node.name}.{suffix}"]
    kind = type(owner).__name__
    if kind == "Conv1D" and value.ndim == 2:  # in_features x out_features
        return value.T
    if kind in ("Gemma2RMSNorm", "Gemma3RMSNorm", "NemotronLayerNorm1P") and suffix == "weight":
        return value + 1
    if isinstance(node.op, ops.TokenEmbedding):
        factor = {"Granite": model.config.to_dict().get("embedding_multiplier")}
        factor |= dict.fromkeys(("Gemma2", "Gemma3"), WIDTH**0.5)
        return value * (factor.get(type(model).__name__.removesuffix("ForCausalLM")) or 1)
    if ".query_key_value" in node.name and "Falcon" in type(model).__name__:  # key heads x (queries, key, value)
        groups = value.reshape(2, HEADS // 2 + 2, HEAD_DIM, -1)
        return torch.cat([part.flatten(0, 2) for part in groups.split([HEADS // 2, 1, 1], dim=1)])
    if ".query_key_value" in node.name:  # heads x parts, where ours has parts x heads
        return value.reshape(HEADS, 3, HEAD_DIM, -1).transpose(0, 1).reshape(value.shape)
    if node.name.endswith(("q_proj", "k_proj")) and type(model).__name__.startswith(("Cohere", "Glm")):
        heads = value.reshape(-1, HEAD_DIM, *value.shape[1:]).clone()
        turned = heads[:, : HEAD_DIM // (2 if type(model).__name__.startswith("Glm") else 1)]
        turned[:] = torch.cat((turned[:, ::2], turned[:, 1::2]), dim=1)  # pairs are neighbours
        return heads.reshape(value.shape)
    return value


def _table(model: Any, state: dict[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    """What is added to every token: a learned position, the first of two types of token, or the bias of the logits."""
    if (bias := state.get(f"{name.removesuffix('.bias')}.bias")) is not None:
        return bias.expand(shape)
    table = state[f"{name}.weight"]
    if "token_type" in name:
        return table[:1].expand(shape)
    first = model.config.pad_token_id + 1 if "roberta" in name else 0
    return table[first : first + shape[0]]


def output_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        output = model(torch.from_numpy(tokens)[None])
    return (output.logits if hasattr(output, "logits") else output[0])[0].numpy()


RARE = ("bert, spelled out", "phi3, spelled out", "falcon, spelled out", "llama without shared heads", "granite", "glm")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in RARE)) for name in MODELS])
def test_a_traced_graph_in_the_clear_is_the_model(name):
    model, graph = made(name)
    tokens = np.random.default_rng(0).integers(3, VOCAB, size=SEQ_LEN)  # the first three are padding and ends
    ours, theirs = execute(graph, deployed(model, graph), tokens), output_of(model, tokens)
    np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("name", ["granite", "gemma2", "cohere", "glm4", "falcon", "openai gpt", "bert of masks"])
def test_a_traced_model_has_the_same_last_logits_however_it_is_run(name):
    model, graph = made(name)
    weights, tokens = deployed(model, graph), np.random.default_rng(0).integers(3, VOCAB, size=SEQ_LEN)
    expected = execute(graph, weights, tokens)[-1:]
    for way in (
        Deployment(projection="last"),
        Deployment(projection="last", rows="needed"),
        Deployment(projection="last", rows="needed", query_block=3),
    ):
        np.testing.assert_allclose(execute(deploy(graph, way), weights, tokens), expected, rtol=1e-9, atol=1e-9)
    step = Deployment(phase="decode")
    if name == "bert of masks":
        with pytest.raises(ValueError, match="phase decode needs ops that .* attends to later tokens"):
            deploy(graph, step)
        return
    decoding = deploy(graph, step)
    caches = kv_cache(decoding, values(trace(model, SEQ_LEN - 1), weights, tokens[:-1]))
    np.testing.assert_allclose(execute(decoding, weights, tokens[-1:], caches), expected, rtol=1e-9, atol=1e-9)


def parts(graph: OpGraph) -> Counter[Any]:
    """How often each op is in each layer."""
    return Counter((node.layer, node.op) for node in graph)


def of_type(graph: OpGraph, *kinds: type) -> list[Any]:
    return [node.op for node in graph if isinstance(node.op, kinds)]


def test_a_public_factor_of_1_changes_no_price():
    assert parts(trace(granite(attention_multiplier=HEAD_DIM**-0.5), SEQ_LEN)) == parts(made("llama")[1])


def test_public_factors_are_folded_into_the_table_and_priced_everywhere_else():
    graph = made("granite with multipliers")[1]
    plain, scaled = parts(trace(granite(attention_multiplier=0.125), SEQ_LEN)), parts(graph)
    branch = ops.Scale(rows=SEQ_LEN, features=WIDTH, factor=0.22)
    logits = ops.Scale(rows=SEQ_LEN, features=VOCAB, factor=0.125)
    assert scaled - plain == {(0, branch): 2, (1, branch): 2, ("head", logits): 1}
    assert plain - scaled == {}
    scores: Any = {"heads": HEADS, "queries": SEQ_LEN, "keys": SEQ_LEN, "head_dim": HEAD_DIM}
    assert set(of_type(graph, ops.AttentionScores)) == {ops.AttentionScores(**scores, factor=0.125)}


def test_soft_caps_are_two_factors_and_a_tangent_of_scores_and_of_logits():
    graph = made("gemma2")[1]
    scores: Any = {"rows": HEADS * SEQ_LEN, "features": SEQ_LEN}
    logits: Any = {"rows": SEQ_LEN, "features": VOCAB}
    cap = [ops.Scale(**scores, factor=0.5), ops.Tanh(**scores), ops.Scale(**scores, factor=2.0)]
    last = [ops.Scale(**logits, factor=1 / 1.5), ops.Tanh(**logits), ops.Scale(**logits, factor=1.5)]
    assert of_type(graph, ops.Scale, ops.Tanh) == [*cap, *cap, *last]
    assert {op.factor for op in of_type(graph, ops.AttentionScores)} == {0.25}  # 16^-1/2, and not 8^-1/2
    assert len(of_type(graph, ops.VocabProjection)) == 1


def test_a_pooler_reads_the_first_token_of_attention_without_a_mask():
    graph = made("bert with a pooler")[1]
    row: Any = {"rows": 1, "features": WIDTH}
    assert [node.op for node in graph][-4:] == [
        ops.TakeRows(rows=SEQ_LEN, features=WIDTH, taken=1),
        ops.Linear(rows=1, in_features=WIDTH, out_features=WIDTH, bias=True),
        ops.Tanh(**row),
        ops.Linear(rows=1, in_features=WIDTH, out_features=2, bias=True),
    ]
    assert {op.causal for op in of_type(graph, ops.Softmax)} == {False}
    assert {op.causal for op in of_type(made("openai gpt")[1], ops.Softmax)} == {True}


def test_a_quick_gelu_is_a_factor_a_logistic_function_and_a_product():
    quick, tanh = (made(name)[1] for name in ("gpt2 of quick gelus", "gpt2"))
    size: Any = {"rows": SEQ_LEN, "features": 4 * WIDTH}
    instead = [ops.Scale(**size, factor=1.702), ops.Sigmoid(**size), ops.Multiply(**size)]
    assert parts(quick) - parts(tanh) == Counter((layer, op) for layer in (0, 1) for op in instead)


def test_position_ids_counted_from_tokens_are_one_table():
    tables = [node.name for node in made("roberta")[1] if isinstance(node.op, ops.PositionEmbedding)]
    assert tables == [f"roberta.embeddings.{part}_embeddings" for part in ("token_type", "position")]
    config = transformers.RobertaConfig(**SIZE, max_position_embeddings=SEQ_LEN + 1, pad_token_id=1)
    with pytest.raises(ValueError, match=r"within its tables, but aten.gather.default in roberta.embeddings raised "):
        trace(transformers.RobertaForMaskedLM(config), SEQ_LEN)


LOGIT_TOLERANCE = 0.05  # of logits up to 3: fixed point, and a tanh of degree 17
RUNS = [
    ("semi2k", "gemma2"),
    ("aby3", "bert with a pooler"),
    ("semi2k", "falcon"),
    *(pytest.param("semi2k", name, marks=pytest.mark.slow) for name in ("glm", "glm4", "phi3", "qwen3", "olmo2")),
    *(pytest.param("semi2k", name, marks=pytest.mark.slow) for name in ("gemma3", "gpt2 of quick gelus")),
    pytest.param("semi2k", "granite with multipliers", marks=pytest.mark.slow),
    pytest.param("aby3", "cohere", marks=pytest.mark.slow),
    pytest.param("cheetah", "gemma2", marks=pytest.mark.slow),
    pytest.param("cheetah", "bert with a pooler", marks=pytest.mark.slow),
]


@pytest.mark.needs_engine
@pytest.mark.parametrize(("protocol", "name"), RUNS)
def test_the_engine_computes_the_model_at_the_predicted_cost(protocol, name, engine_logits):
    model, graph = made(name)
    tokens = np.random.default_rng(0).integers(3, VOCAB, size=SEQ_LEN)
    logits, theirs = engine_logits(graph, deployed(model, graph), tokens, protocol=protocol), output_of(model, tokens)
    assert np.abs(logits.reshape(theirs.shape) - theirs).max() < LOGIT_TOLERANCE
