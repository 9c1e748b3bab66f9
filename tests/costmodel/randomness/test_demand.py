import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import ops
from costmodel.protocols import semi2k
from costmodel.protocols.primitives import PRIMITIVES, Call, EngineSetting
from costmodel.randomness.demand import PIECES, Piece, opened_bytes, pieces_of

SETTING = EngineSetting()


def sent(call, setting):
    return semi2k.PRICES[call.primitive](call, setting).online_bytes


def test_every_primitive_has_its_pieces():
    assert set(PIECES) == set(PRIMITIVES)


@given(
    primitive=st.sampled_from([name for name in PRIMITIVES if name != "matmul"]),
    elements=st.integers(1, 10**6),
    bits=st.integers(1, 64),
    ring_bits=st.sampled_from([32, 64, 128]),
)
def test_what_the_pieces_mask_is_what_the_protocol_sends(primitive, elements, bits, ring_bits):
    """Demand and price cannot drift apart: each masked number is opened once by each party."""
    setting = EngineSetting(ring_bits=ring_bits, fraction_bits=12)
    call = Call(primitive=primitive, elements=elements, bits=bits)
    assert sum(map(opened_bytes, PIECES[primitive](call, setting))) == sent(call, setting)


@given(rows=st.integers(1, 300), inner=st.integers(1, 300), columns=st.integers(1, 300))
def test_of_matrices_likewise(rows, inner, columns):
    call = Call(primitive="matmul", elements=rows * columns, operands=inner * (rows + columns), factors=(rows, columns))
    (piece,) = PIECES["matmul"](call, SETTING)
    assert piece == Piece(kind="matrix", elements=rows * columns, bits=64, shape=(rows, inner, columns))
    assert opened_bytes(piece) == sent(call, SETTING)


@pytest.mark.parametrize("name", ["SM+LN+G", "HH(SM+ScFFN)", "SM(t)+ScFuFFN_i1"])
def test_of_whole_models(name, graph_of):
    for node in graph_of(name, seq_len=8, base="tiny"):
        assert sum(map(opened_bytes, pieces_of(node.op, SETTING))) == semi2k.comm(node.op, SETTING).online_bytes


def test_a_relu_written_out():
    """A sign, an AND and a tree of halves, and a selection; nothing is cut off."""
    pieces = pieces_of(ops.Relu(rows=2, features=5), SETTING)
    tree = [Piece(kind="and", elements=20, bits=bits) for bits in (32, 16, 8, 4, 2, 1)]
    assert list(pieces) == [
        Piece(kind="and", elements=10, bits=64),
        *tree,
        Piece(kind="product", elements=10, bits=64),
    ]
