import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import ops
from costmodel.deployment.deploy import Deployment
from costmodel.engine.compare import drawn_weights
from costmodel.errors import UserError
from costmodel.estimate import estimate, estimate_generation
from costmodel.execution import interpreter
from costmodel.protocols import load_pricer
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.budget.priced_space import price_architecture
from search_spaces.deployed import deployed
from search_spaces.lower import Workload, lower
from search_spaces.notation import parse

TINY = BASES["tiny"]  # 2 layers, 2 heads, d_model 16, d_ff 64, vocabulary 512, context 128


def names(text: str, layer: int | str, base: str = "tiny") -> list[str]:
    return [node.name for node in lower(parse(text, BASES[base]).architecture, 8) if node.layer == layer]


def test_shapes_of_every_op_in_order():
    graph = lower(parse("EReg(SM(t)+LN+G)", TINY).architecture, 8)
    named = [(node.name.removeprefix("layers.0."), node.op) for node in graph if node.layer != 1]
    heads: Any = {"heads": 2, "queries": 8, "keys": 8}
    expected = {
        "embed": ops.TokenEmbedding(tokens=8, vocab=512, features=16),
        "position": ops.PositionEmbedding(rows=8, features=16),
        "norm1": ops.LayerNorm(rows=8, features=16),
        "attention.qkv": ops.Linear(rows=8, in_features=16, out_features=48, bias=True),
        "attention.scores": ops.AttentionScores(**heads, head_dim=8),
        "attention.temperature": ops.Temperature(**heads),
        "attention.softmax": ops.Softmax(**heads),
        "attention.mix": ops.AttentionMix(**heads, head_dim=8),
        "attention.out": ops.Linear(rows=8, in_features=16, out_features=16, bias=True),
        "attention.residual": ops.Add(rows=8, features=16),
        "norm2": ops.LayerNorm(rows=8, features=16),
        "ffn.up": ops.Linear(rows=8, in_features=16, out_features=64, bias=True),
        "ffn.activation": ops.Gelu(rows=8, features=64, form="tanh"),
        "ffn.down": ops.Linear(rows=8, in_features=64, out_features=16, bias=True),
        "ffn.residual": ops.Add(rows=8, features=16),
        "final_norm": ops.LayerNorm(rows=8, features=16),
        "logits": ops.VocabProjection(rows=8, features=16, vocab=512),
    }
    assert named == list(expected.items())


@given(seq_len=st.integers(1, 128), layers=st.integers(1, 4))
def test_layers_come_in_order_and_the_logits_last(seq_len, layers):
    graph = lower(replace(TINY, layers=TINY.layers[:1] * layers), seq_len)
    assert list(dict.fromkeys(node.layer for node in graph)) == ["embed", *range(layers), "head"]
    assert graph.nodes[-1].op == ops.VocabProjection(rows=seq_len, features=16, vocab=512)


def test_half_of_one_head_is_one_and_the_first_token_is_decoded_as_a_prompt_of_one():
    base = base_architecture("tiny", Dimensions(heads=1))
    assert lower(parse("LHLGo", base).architecture, 8) == lower(parse("LSLGo", base).architecture, 8)
    assert lower(TINY, 1, Deployment(phase="decode")) == lower(TINY, 1)


@pytest.mark.parametrize("base", ["tiny", "pythia-70m"])
def test_without_attention_the_ffn_alone_writes_to_the_stream(base):
    assert names("ooLGo", 1, base) == [
        f"layers.1.{name}" for name in ("norm2", "ffn.up", "ffn.activation", "ffn.down", "ffn.residual")
    ]
    assert names("ooooo", 1, base) == []
    graph = lower(parse("ooooo", BASES[base]).architecture, 8)
    assert [node.layer for node in graph] == ["embed"] * (2 if base == "tiny" else 1) + ["head"]


def test_the_last_token_alone_goes_through_final_norm_and_projection():
    graph = lower(parse("SM+LN+G", TINY).architecture, 8, Deployment(projection="last"))
    assert [node.op for node in graph if node.layer == "head"] == [
        ops.TakeRows(rows=8, features=16, taken=1, first=7),
        ops.LayerNorm(rows=1, features=16),
        ops.VocabProjection(rows=1, features=16, vocab=512),
    ]
    assert graph.nodes[:-3] == lower(parse("SM+LN+G", TINY).architecture, 8).nodes[:-2]


LLAMA = base_architecture("smollm2-135m", Dimensions(layers=3, heads=4, kv_heads=2, head_size=6, d_model=16, vocab=20))


@pytest.mark.parametrize("base", [replace(TINY, num_heads=4, num_kv_heads=2, head_size=6), LLAMA])
def test_a_bound_changes_nothing_in_the_clear(base):
    bounded = lower(replace(base, softmax="bounded"), 8)
    weights = drawn_weights(bounded, np.random.default_rng(0))
    tokens = np.arange(8)
    logits = interpreter.execute(lower(base, 8), weights, tokens)
    np.testing.assert_allclose(interpreter.execute(bounded, weights, tokens), logits, atol=1e-12)
    spread = {name: value + 3 if name.endswith("bound.weight") else value for name, value in weights.items()}
    np.testing.assert_allclose(interpreter.execute(bounded, spread, tokens), logits, atol=1e-12)


def rotated(**dimensions):
    return lambda: lower(base_architecture("pythia-70m", Dimensions(**dimensions)), 8)


NO_PAIRS = "must be even and no more than it has, but got head_dim={};"
NO_CONTEXT = "`seq_len` must be between 1 and the context 128, but got {}."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lower(TINY, 0), NO_CONTEXT.format(0)),
        (lambda: lower(TINY, -1), NO_CONTEXT.format(-1)),
        (lambda: lower(TINY, 129), NO_CONTEXT.format(129)),
        (rotated(heads=1, d_model=12), NO_PAIRS.format(12)),  # 3 of 12 features
        (rotated(heads=2, d_model=2), NO_PAIRS.format(1)),
        ({"num_kv_heads": 3}, "`num_kv_heads` must divide `num_heads`, but got num_kv_heads=3, num_heads=4."),
        ({"head_size": 0}, "`head_size` must be at least 1, but got 0"),
        ({"final_norm": "layernorm"}, "block 'llama' has norms without a mean and bias, but got 'layernorm'; use 'rms"),
        ({"rotary_base": 1.0}, "`rotary_base` must be finite and above 1, but got 1.0"),
        (
            {"inner_scales": (("layers.0.ffn.norm", 0.0),)},
            "`inner_scales` must be finite and above 0, but got 0.0 for l",
        ),
        ({"block": "sas", "num_kv_heads": None}, "block 'sas' passes slices of the stream on, so its heads are d_mo"),
    ],
)
def test_what_cannot_be_lowered_or_made_a_llama_is_refused(make, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make() if callable(make) else replace(LLAMA, **make)


TEMPERED = parse("SM(t)+LN+R", BASES["tiny"]).architecture  # context 128


def test_every_other_token_is_decoded_against_those_before_it():
    """The prompt gives the first of three; the second is decoded as token 9, the third as token 10."""
    last = Deployment(projection="last", embedding="lookup")
    decode = Deployment(phase="decode", embedding="lookup")
    graphs = [lower(TEMPERED, 8, last), lower(TEMPERED, 9, decode), lower(TEMPERED, 10, decode)]
    assert Workload(prompt_len=8, new_tokens=3, deployment=last).graphs(TEMPERED) == graphs
    assert Workload(prompt_len=8, deployment=last).graphs(TEMPERED) == graphs[:1]
    assert Workload(prompt_len=9, deployment=decode).graphs(TEMPERED) == graphs[1:2]  # one decoded token alone


def test_prompt_and_new_tokens_must_fit_the_context_and_be_some():
    """The last new token is not read again: 100 + 29 - 1 tokens are the whole context."""
    decode = Deployment(phase="decode")
    assert len(Workload(prompt_len=100, new_tokens=29).graphs(TEMPERED)) == 29
    for make, message in (
        (lambda: Workload(prompt_len=8, new_tokens=0, deployment=decode), "--new-tokens must be at least 1, but got 0"),
        (lambda: Workload(prompt_len=8, new_tokens=2, deployment=decode), "--new-tokens .*with phase decode"),
        (
            lambda: Workload(prompt_len=100, new_tokens=30).graphs(TEMPERED),
            "must fit the context of 128 tokens, but got a prompt of 100 and 30 new tokens; shorten either",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("cost_of", ["folded", "unfolded"])
def test_a_price_and_its_range_are_means_over_the_new_tokens(cost_of):
    """Under semi2k, by hand: the prompt, then tokens 9 and 10, a third each; rounds and messages too."""
    pricer = load_pricer("semi2k")
    run = deployed(TEMPERED) if cost_of == "folded" else TEMPERED
    graphs = [lower(run, 8), *(lower(run, length, Deployment(phase="decode")) for length in (9, 10))]
    totals = [estimate(graph, pricer).total for graph in graphs]
    price = price_architecture(TEMPERED, pricer, Workload(prompt_len=8, new_tokens=3), cost_of).price
    for name in ("latency_s", "sent_bytes", "rounds", "messages", "online_bytes", "setup_bytes"):
        assert getattr(price, name) == pytest.approx(sum(getattr(total, name) for total in totals) / 3)
    assert totals[1].sent_bytes < totals[2].sent_bytes < totals[0].sent_bytes
    pricer, architecture = load_pricer(), parse("SM+LN+R", BASES["tiny"]).architecture
    run = deployed(architecture) if cost_of == "folded" else architecture
    graphs = [lower(run, 8), lower(run, 9, Deployment(phase="decode"))]
    together = estimate_generation(graphs, pricer).whole.latency_s_range
    price, latency_range = price_architecture(architecture, pricer, Workload(prompt_len=8, new_tokens=2), cost_of)
    assert latency_range == pytest.approx((together[0] / 2, together[1] / 2))
    assert latency_range[0] <= price.latency_s <= latency_range[1]


def test_what_is_folded_is_priced_as_it_is(pricer):
    folded = deployed(parse("SM+LN+G", BASES["tiny"]).architecture)
    both = [price_architecture(folded, pricer, Workload(prompt_len=8), cost_of) for cost_of in ("folded", "unfolded")]
    assert both[0] == both[1]
