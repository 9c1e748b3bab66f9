"""The vocabulary projection in blocks: the same logits, and fewer bytes where the engine would cut it to tiles."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodel import ops
from costmodel.deployment.deploy import Deployment, deploy
from costmodel.engine.compare import drawn_weights
from costmodel.execution import interpreter
from costmodel.ops import Node, OpGraph
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

BASE = base_architecture("tiny", Dimensions(vocab=41, context=16))
MODEL = parse("SM+LN+R", BASE).architecture
WAYS = [Deployment(), Deployment(projection="last"), Deployment(phase="decode"), Deployment(batch=2)]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("num_blocks", [2, 3, 41])
def test_logits_are_those_of_the_whole_projection(way, num_blocks):
    whole, blocks = (lower(MODEL, 7, replace(way, vocab_blocks=count)) for count in (1, num_blocks))
    weights = drawn_weights(whole, np.random.default_rng(0))
    tokens = np.arange(next(node.op for node in whole if isinstance(node.op, ops.TokenEmbedding)).tokens)
    caches = {cache.name: np.random.default_rng(1).normal(size=cache.shape) for cache in whole.inputs}
    logits, wanted = (interpreter.execute(graph, weights, tokens, caches) for graph in (blocks, whole))
    np.testing.assert_allclose(logits, wanted, rtol=1e-12, atol=1e-12)


def test_blocks_read_their_own_entries():
    """41 entries in 3 blocks: 14, 14 and 13."""
    *_, first, second, third, joined = lower(MODEL, 7, Deployment(vocab_blocks=3))
    shared: Any = {"rows": 7, "features": 16, "whole": 41}
    assert [node.op for node in (first, second, third)] == [
        ops.VocabProjection(**shared, vocab=14),
        ops.VocabProjection(**shared, vocab=14, first=14),
        ops.VocabProjection(**shared, vocab=13, first=28),
    ]
    assert joined.name == "logits"
    assert joined.inputs == ("logits@0", "logits@14", "logits@28")
    assert joined.op == ops.JoinColumns(rows=7, features=41, part=14)


def test_weights_of_another_vocabulary_are_refused():
    blocks = lower(MODEL, 5, Deployment(vocab_blocks=2))
    weights = drawn_weights(lower(MODEL, 5), np.random.default_rng(0))
    weights["logits.weight"] = np.zeros((42, 16))
    with pytest.raises(ValueError, match=r"weight 'logits.weight' must have the shape \(41, 16\), but has \(42, 16\)"):
        interpreter.execute(blocks, weights, np.arange(5))


def test_more_blocks_than_entries_are_refused():
    message = "`vocab_blocks` must be of at least an entry each, but got 42 and a vocabulary of 41"
    with pytest.raises(ValueError, match=message):
        lower(MODEL, 5, Deployment(vocab_blocks=42))
    with pytest.raises(ValueError, match="`vocab_blocks` must be at least 1, but got 0"):
        Deployment(vocab_blocks=0)
    embedding = Node(
        name="embed", layer="embed", op=ops.TokenEmbedding(tokens=2, vocab=3, features=4), inputs=("tokens",)
    )
    with pytest.raises(ValueError, match="but got 2 and no vocabulary projection"):
        deploy(OpGraph(nodes=(embedding,)), Deployment(vocab_blocks=2))
