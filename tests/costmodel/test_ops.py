import pytest

from costmodel.ops import (
    OP_TYPES,
    Add,
    Gelu,
    Input,
    KeyValueCache,
    Linear,
    Node,
    OpGraph,
    PositionEmbedding,
    Relu,
    shape,
)

RELU = Relu(rows=2, features=3)


def node(name, op=RELU, inputs=("tokens",)):
    return Node(name=name, layer=0, op=op, inputs=inputs)


def test_a_shape_has_dimensions_and_no_flags():
    assert shape(Linear(rows=1, in_features=2, out_features=3, bias=True)) == {
        "rows": 1,
        "in_features": 2,
        "out_features": 3,
    }
    assert shape(Gelu(rows=1, features=2, form="tanh")) == {"rows": 1, "features": 2}


def test_op_types_are_distinct_and_frozen():
    assert len(set(OP_TYPES)) == len(OP_TYPES) > 0
    with pytest.raises(AttributeError):
        RELU.rows = 3  # type: ignore[misc]


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


def test_an_offset_is_a_dimension_where_there_is_one():
    assert shape(PositionEmbedding(rows=1, features=2)) == {"rows": 1, "features": 2}
    assert shape(PositionEmbedding(rows=1, features=2, past_len=3)) == {"rows": 1, "features": 2, "past_len": 3}


def test_a_node_may_read_an_input_of_the_graph():
    cache = KeyValueCache(past_len=3, rows=1, features=2)
    nodes = (node("a", cache, inputs=("kept", "tokens")),)
    assert OpGraph(nodes=nodes, inputs=(Input(name="kept", shape=(3, 2)),)).inputs[0].shape == (3, 2)
    with pytest.raises(ValueError, match=r"node 'a' reads \['kept'\], which no earlier node produces"):
        OpGraph(nodes=nodes)
    with pytest.raises(ValueError, match="names must be unique, but 'kept' appears twice"):
        OpGraph(nodes=(node("kept"),), inputs=(Input(name="kept", shape=(3, 2)),))


def test_a_graph_iterates_in_execution_order():
    graph = OpGraph(nodes=(node("a"), node("b", inputs=("a",))))
    assert [each.name for each in graph] == ["a", "b"]
