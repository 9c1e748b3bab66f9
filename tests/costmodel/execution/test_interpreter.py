"""What the interpreter reads."""

import numpy as np

from costmodel import ops
from costmodel.execution.interpreter import encoded
from costmodel.ops import Node, OpGraph


def test_one_hot_tokens_hold_no_more_than_their_rows():
    """A square of so large a vocabulary would be 8 TiB."""
    embedding = ops.TokenEmbedding(tokens=2, vocab=1 << 20, features=3)
    graph = OpGraph(nodes=(Node(name="embed", layer=0, op=embedding, inputs=("tokens",)),))
    one_hot = encoded(graph, np.array([7, (1 << 20) - 1]))
    assert one_hot.shape == (2, 1 << 20)
    assert [np.flatnonzero(row).tolist() for row in one_hot] == [[7], [(1 << 20) - 1]]
    assert one_hot.max() == one_hot.sum(axis=1).max() == 1
