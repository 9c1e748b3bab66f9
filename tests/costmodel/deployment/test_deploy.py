"""Ways to run a model that change its price: the logits that are asked for stay what they are."""

from dataclasses import replace

import numpy as np
import pytest

from costmodel import ops
from costmodel.deployment.deploy import Deployment, deploy
from costmodel.engine.compare import drawn_weights
from costmodel.execution import interpreter
from costmodel.ops import Op, OpGraph
from search_spaces.architecture import Architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.small_models import GPT2, PYTHIA

MODELS = [
    (GPT2, "SM(t)+LN+G"),
    (GPT2, "1xLHLRo-1xooLGs"),  # the last attention is in the first layer
    (GPT2, "2xooLRo"),
    (GPT2, "1xMQMRo-1xoUoKs"),
    (GPT2, "HH(SM(t)+G)"),
    (PYTHIA, "SM+LN+G"),
]
NEEDED = Deployment(projection="last", rows="needed")
LENGTH = 11


def both(base: Architecture, name: str, deployment: Deployment) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the whole prompt, and as deployed."""
    architecture = parse(name, base).architecture
    whole = lower(architecture, LENGTH)
    weights = drawn_weights(whole, np.random.default_rng(0))
    tokens = np.random.default_rng(1).integers(architecture.vocab_size, size=LENGTH)
    logits = interpreter.execute(lower(architecture, LENGTH, deployment), weights, tokens)
    return interpreter.execute(whole, weights, tokens), logits


@pytest.mark.parametrize(("base", "name"), MODELS)
@pytest.mark.parametrize("block", [None, 1, 4, 11, 20])
def test_rows_that_the_last_logits_do_not_need_are_left_out(base, name, block):
    whole, logits = both(base, name, replace(NEEDED, query_block=block))
    np.testing.assert_allclose(logits, whole[-1:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("base", "name"), MODELS)
@pytest.mark.parametrize("block", [1, 3, 11])
def test_attention_in_blocks_of_queries_is_the_whole_one(base, name, block):
    whole, logits = both(base, name, Deployment(query_block=block))
    np.testing.assert_allclose(logits, whole, rtol=1e-9, atol=1e-9)


def op_of(graph: OpGraph, name: str) -> Op:
    return next(node.op for node in graph if node.name == name)


def test_the_last_layer_is_run_for_the_last_row_but_for_keys_and_values():
    graph = lower(parse("SM+LN+R", GPT2).architecture, 8, NEEDED)
    assert op_of(graph, "layers.0.ffn.up") == ops.Linear(rows=8, in_features=16, out_features=64, bias=True)
    assert op_of(graph, "layers.1.attention.qkv") == ops.Linear(rows=8, in_features=16, out_features=48, bias=True)
    assert op_of(graph, "layers.1.attention.softmax") == ops.Softmax(heads=2, queries=1, keys=8)
    assert op_of(graph, "layers.1.ffn.up") == ops.Linear(rows=1, in_features=16, out_features=64, bias=True)
    assert op_of(graph, "logits") == ops.VocabProjection(rows=1, features=16, vocab=GPT2.vocab_size)


def test_blocks_see_the_keys_up_to_their_own_end():
    graph = lower(parse("SM+G", GPT2).architecture, 8, Deployment(query_block=3))
    blocks = [node.op for node in graph if isinstance(node.op, ops.Softmax) and node.layer == 0]
    assert blocks == [ops.Softmax(heads=2, queries=queries, keys=keys) for queries, keys in ((3, 3), (3, 6), (2, 8))]
    assert op_of(graph, "layers.0.attention.mix") == ops.JoinRows(rows=8, features=16, part=3)


def test_a_block_as_long_as_the_prompt_and_a_prompt_of_one_token_change_nothing():
    plain = parse("SM+G", GPT2).architecture
    assert lower(plain, 8, Deployment(query_block=8)) == lower(plain, 8)
    assert lower(plain, 1, NEEDED) == lower(plain, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": "needed"}, "`rows` needed goes with projection last, but got projection all"),
        ({"query_block": 0}, "`query_block` must be at least 1, but got 0"),
        ({"phase": "decode", "projection": "last"}, "`projection` last goes with phase prefill"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Deployment(**changes)


def test_an_op_that_mixes_tokens_otherwise_is_refused():
    plain = lower(parse("SM+G", GPT2).architecture, 8)
    joined = ops.Node(name="odd", layer=0, op=ops.JoinRows(rows=8, features=16, part=8), inputs=("position",))
    nodes = (*plain.nodes[:2], joined, *plain.nodes[2:])
    with pytest.raises(ValueError, match="work token by token or look back, but 'odd' is JoinRows"):
        deploy(OpGraph(nodes=nodes), Deployment(phase="decode"))
