import pytest

from costmodel import ops
from costmodel.data_range import DataRange, describe
from costmodel.deployment.deploy import Deployment
from costmodel.protocols import load_pricer, published
from costmodel.protocols.published import published_rows
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

PRICER = published.load()
VOCAB_60_000 = "vocab_size 60000 (data: 50000)"
LAST, BLOCKS = "projection last (data: all)", "attention in blocks of queries (data: all at once)"
FREE = {ops.PackHeads, ops.RepeatHeads}  # move numbers; no row of notation has them


def test_the_range_is_that_of_the_fitted_rows(row_graphs):
    model = {"d_model": (768,), "d_ff": (3072,), "num_heads": (12,), "num_layers": (12, 18)}
    assert PRICER.data.dimensions == {**model, "vocab_size": (50_000,), "seq_len": (128, 256)}
    # what was fitted is what is read
    assert [row.name for row in PRICER.rows] == [row.name for row in published_rows()]
    in_rows = {type(node.op) for graph in row_graphs.values() for node in graph}
    assert in_rows | FREE == published.ROW_OPS
    assert not in_rows & FREE
    for name, graph in row_graphs.items():
        assert PRICER.extrapolated(graph) == (), name


@pytest.mark.parametrize(
    ("notation", "changes", "outside"),
    [
        ("SM+LN+G", {"d_model": 12}, ("d_model 12 (data: 768)", "d_ff 48 (data: 3072)")),
        ("SM+ScFuFFN", {"d_model": 1536, "heads": 24}, ("d_model 1536 (data: 768)", "num_heads 24 (data: 12)")),
        ("SM+ScFFN", {"d_ff": 1000}, ("d_ff 1000 (data: 3072)",)),  # without activation, from linears alone
        ("6xoHoRo-6xoSoRo", {}, ("num_heads 6 (data: 12)",)),
        ("12xoHoRo", {"heads": 24}, ()),  # half of 24
        ("SM+LN+G", {"layers": 19}, ("num_layers 19 (data: 12 to 18)",)),
        ("SM+LN+G", {"layers": 11, "vocab": 60_000}, ("num_layers 11 (data: 12 to 18)", VOCAB_60_000)),
        ("SM+LN+G", {"vocab": 50_257, "layers": 13}, ()),  # GPT-2's own vocabulary is within the margin
        ("12xlSoKo", {}, ("FrozenNorm (data: none)", "LeakyRelu (data: none)")),
    ],
)  # fmt: skip
def test_what_lies_outside(notation, changes, outside):
    architecture = parse(notation, base_architecture("gpt2-small", Dimensions(**changes))).architecture
    assert PRICER.extrapolated(lower(architecture, 128)) == outside


@pytest.mark.parametrize(
    ("seq_len", "way", "outside"),
    [
        (512, {}, ("seq_len 512 (data: 128 to 256)",)),
        (130, {"phase": "decode"}, ("phase decode (data: prefill)",)),
        (130, {"projection": "last"}, (LAST,)),
        (130, {"query_block": 64}, (BLOCKS,)),
        (130, {"batch": 2}, ("batch 2 (data: 1)",)),
        (130, {"query_block": 64, "projection": "last"}, (LAST, BLOCKS)),
    ],
)
def test_lengths_and_ways_to_run_a_model(seq_len, way, outside):
    assert PRICER.extrapolated(lower(base_architecture("gpt2-small"), seq_len, Deployment(**way))) == outside


def test_a_range_of_no_dimension_knows_its_ops_and_derived_prices_have_bounds_of_them(graph_of):
    data = DataRange(dimensions={}, op_types=frozenset({ops.Add}))
    assert "Softmax (data: none)" in data.outside(graph_of("SM"))
    assert describe(()) == ""
    outside = ["num_layers 10 (data: 12)", "Softmax 2.0x", "num_layers 6 (data: 12)", "Softmax 3.0x"]
    assert describe(outside) == "extrapolated: num_layers 6, 10 (data: 12), Softmax 3.0x"
    derived = load_pricer("semi2k").extrapolated(graph_of("SM", layers=1))
    assert "Softmax 3.0x" in derived  # 12 heads, 4 of which were measured
    assert not any("data:" in text for text in derived)
