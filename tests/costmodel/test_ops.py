import numpy as np
import pytest

from costmodel import ops
from costmodel.execution.interpreter import operands
from costmodel.execution.op_functions import evaluate, numpy_library
from costmodel.ops import Add, Gelu, Input, KeyValueCache, Linear, Node, OpGraph, PositionEmbedding, Relu, shape

RELU = Relu(rows=2, features=3)


def node(name, op=RELU, inputs=("tokens",)):
    return Node(name=name, layer=0, op=op, inputs=inputs)


def test_a_shape_has_dimensions_with_an_offset_where_there_is_one_and_no_flags():
    linear = Linear(rows=1, in_features=2, out_features=3, bias=True)
    assert shape(linear) == {"rows": 1, "in_features": 2, "out_features": 3}
    assert shape(PositionEmbedding(rows=1, features=2)) == {"rows": 1, "features": 2}
    assert shape(PositionEmbedding(rows=1, features=2, past_len=3)) == {"rows": 1, "features": 2, "past_len": 3}
    assert shape(Gelu(rows=1, features=2, form="tanh")) == {"rows": 1, "features": 2}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((node("a"), node("a")), "names must be unique, but 'a' appears twice"),
        ((node("tokens"),), "'tokens' appears twice"),
        ((node("a", inputs=("b",)),), r"node 'a' reads \['b'\], which no earlier node produces"),
        ((node("a", Add(rows=0, features=1)),), "`rows` of node 'a' must be at least 1, but got 0"),
    ],
)
def test_impossible_graphs_are_refused(nodes, message):
    with pytest.raises(ValueError, match=message):
        OpGraph(nodes=nodes)


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
def test_scores_have_a_factor(factor):
    with pytest.raises(ValueError, match="`factor` of attention scores must be finite and not 0, but got"):
        ops.AttentionScores(heads=1, queries=2, keys=2, head_dim=4, factor=factor)


def test_a_node_may_read_an_input_of_the_graph():
    cache = KeyValueCache(past_len=3, rows=1, features=2)
    nodes = (node("a", cache, inputs=("kept", "tokens")),)
    assert OpGraph(nodes=nodes, inputs=(Input(name="kept", shape=(3, 2)),)).inputs[0].shape == (3, 2)
    with pytest.raises(ValueError, match=r"node 'a' reads \['kept'\], which no earlier node produces"):
        OpGraph(nodes=nodes)
    for names in (("kept", "kept"), ("tokens",)):
        with pytest.raises(ValueError, match=r"names of inputs must be unique, and none `tokens`, but got"):
            OpGraph(nodes=nodes, inputs=tuple(Input(name=name, shape=(3, 2)) for name in names))
    with pytest.raises(ValueError, match="names must be unique, but 'kept' appears twice"):
        OpGraph(nodes=(node("kept"),), inputs=(Input(name="kept", shape=(3, 2)),))


ROWWISE = (
    ops.TokenEmbedding(tokens=5, vocab=7, features=6),
    ops.PositionEmbedding(rows=5, features=6, past_len=2),
    ops.LayerNorm(rows=5, features=6),
    ops.RmsNorm(rows=5, features=6),
    ops.FrozenNorm(rows=5, features=6, centred=True),
    ops.Linear(rows=5, in_features=6, out_features=4, bias=True),
    ops.PackHeads(rows=5, query_features=6, key_features=2),
    ops.Rotary(rows=5, heads=3, rotary_dim=2, past_len=1),
    ops.RepeatHeads(rows=5, heads=4, key_heads=2, head_dim=2),
    ops.VocabProjection(rows=5, features=6, vocab=7),
    *(kind(rows=5, features=6) for kind in (ops.Relu, ops.LeakyRelu, ops.Square, ops.Silu, ops.Sigmoid, ops.Tanh)),
    *(kind(rows=5, features=6) for kind in (ops.Add, ops.ScaledAdd, ops.Multiply)),
    ops.Scale(rows=5, features=6, factor=0.5),
    ops.Gelu(rows=5, features=6, form="tanh"),
    ops.TakeColumns(rows=5, features=6, taken=2, first=3),
)


def evaluated(op: ops.Op, weights: dict[str, np.ndarray], inputs: list[np.ndarray]) -> np.ndarray:
    node = ops.Node(name="op", layer=0, op=op, inputs=())
    return evaluate(op, numpy_library(), operands(node, weights), *inputs)


@pytest.mark.parametrize("op", ROWWISE, ids=lambda op: type(op).__name__)
def test_a_row_of_a_row_wise_op_is_of_the_same_row_of_what_it_reads(op):
    """Decoding and the last row alone run such an op on fewer rows."""
    rng = np.random.default_rng(0)
    weights = {f"op.{suffix}": rng.uniform(0.5, 1.5, shape) for suffix, shape in op.weight_shapes.items()}
    inputs = [rng.standard_normal(shape) for shape in op.input_shapes]
    whole = evaluated(op, weights, inputs)
    for row in range(5):
        alone = evaluated(op.of_rows(row, 1), weights, [source[row : row + 1] for source in inputs])
        np.testing.assert_allclose(alone, whole[row : row + 1])


def test_every_row_wise_op_is_tried():
    assert {type(op) for op in ROWWISE} == {kind for kind in ops.OP_TYPES if kind.is_rowwise}
