from dataclasses import MISSING, fields, replace

import pytest

from costmodel import ops
from costmodel.cost import Budget, total_price
from costmodel.protocols import load_pricer, published

PRICER = published.load()
FIVE_MINUTES = Budget(latency_s=300.0)
PRICED = [kind for kind in ops.OP_TYPES if kind.is_local or kind in published.COUNTS]
FREE = {ops.PositionEmbedding, ops.Rotary, ops.Temperature, ops.ScaledAdd, ops.FrozenNorm}
FREE |= {kind for kind in PRICED if kind.is_local}


def an_op(kind, sizes):
    """An op of a type with the given dimensions, any value of its flags, and what else has a default."""
    others = {"bias": True, "form": "tanh", "centred": True}
    names = [field.name for field in fields(kind) if field.default is MISSING]
    dimensions = dict(zip([name for name in names if name not in others], sizes, strict=False))
    return kind(**dimensions, **{name: others[name] for name in names if name in others})


def price_of(graph):
    return total_price(PRICER.price(node.op) for node in graph)


def test_counts_are_of_known_terms():
    for kind in PRICED:
        assert set(published.counts(an_op(kind, [2] * 4))) <= set(published.TERMS)


def test_an_unknown_op_is_an_error_and_never_free():
    class Unknown(ops.OnRows):
        pass

    with pytest.raises(ValueError, match="no formula for Unknown"):
        PRICER.price(Unknown(rows=1, features=1))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (ops.Gelu(rows=1, features=1, form="piecewise"), "Gelu with `form` tanh or exact only, but got 'piecewise'; "),
        (ops.Softmax(heads=1, queries=1, keys=1, form="relu"), "Softmax with `form` exact only, but got 'relu'; "),
        (ops.TokenEmbedding(tokens=1, vocab=1, features=1, encoding="lookup"), "`encoding` one-hot only, but got 'lo"),
    ],
)
def test_forms_without_a_printed_row_are_refused(op, message):
    with pytest.raises(ValueError, match=f"{message}.*choose protocol semi2k, aby3 or cheetah"):
        PRICER.price(op)


@pytest.mark.parametrize("kind", PRICED)
def test_free_ops_are_free_and_others_are_not(kind):
    price = PRICER.price(an_op(kind, [128 if kind in FREE else 1] * 4))
    assert (price.latency_s == 0, price.sent_bytes == 0) == (kind in FREE, kind in FREE)
    assert min(price.latency_s, price.sent_bytes) >= 0


COUNTS = {
    # 12 layers, T = 128, d = 768, d_ff = 3072, 12 heads of 64, vocabulary 50,000.
    "SM+LN+G": {
        "linear_elements": 12 * 128 * ((768 + 3 * 768) + (768 + 768) + 2 * (768 + 3072)),
        "linear_rows": 12 * 4 * 128,  # QKV, output, up, down
        "attention_elements": 12 * 2 * 12 * (128 + 128) * 64,
        "softmax_scores": 12 * 12 * 128 * 128,
        "layernorm_elements": (2 * 12 + 1) * 128 * 768,  # two a layer and the final one
        "gelu_elements": 12 * 128 * 3072,
    },
    # 12 layers of QK (768 -> 1536) and one fused FFN linear, V in layer 0 only, shaped attention, one LayerNorm.
    "HH(SM+ScFuFFN)": {
        "linear_elements": 128 * (12 * (768 + 2 * 768) + 12 * (768 + 768) + (768 + 768)),
        "linear_rows": (12 + 12 + 1) * 128,
        "attention_elements": 12 * 2 * 12 * (128 + 128) * 64,
        "softmax_scores": 12 * 12 * 128 * 128,
        "shaped_scores": 12 * 12 * 128 * 128,
        "layernorm_elements": 128 * 768,
    },
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_written_out(graph_of, name):
    embedded = {"vocabulary_elements": 2 * 128 * 50_000}
    assert published.graph_counts(graph_of(name)) == dict.fromkeys(published.TERMS, 0) | embedded | COUNTS[name]


def test_what_fits_five_minutes_at_128_tokens(graph_of, rows):
    printed = {row.notation for row in rows if row.num_layers == 12 and row.seq_len == 128}
    fitting = {name for name in printed if FIVE_MINUTES.admits(price_of(graph_of(name)))}
    assert fitting == {
        "SM+ScFuFFN",
        "SM+ScFuFFN_i6",
        "EReg(SM(t)+ScFuFFN)",
        "EReg(SM(t)+ScFuFFN_i6)",
        "HH(SM+ScFuFFN)",
        "HH(SM+ScFuFFN_i4)",
    }


@pytest.mark.parametrize("name", ["SM+LN+G", "SM+LN+R", "SM+ScFuFFN_i6", "HH(SM+ScFFN)", "6xLSLGo-6xoSoFs"])
@pytest.mark.parametrize("sizes", [{}, {"seq_len": 256}, {"d_model": 192, "vocab": 1000, "heads": 3}])
def test_the_point_lies_in_its_range(graph_of, name, sizes):
    graph = graph_of(name, **sizes)
    low, high = PRICER.latency_s_range(graph)
    assert 0 < low <= price_of(graph).latency_s <= high
    assert high > low


def test_the_range_is_no_wider_than_the_tolerance_on_a_printed_row(rows, row_graphs):
    for row in rows:
        low, high = PRICER.latency_s_range(row_graphs[row.name])
        assert low >= row.latency_s * (1 - PRICER.latency_tolerance - 1e-6)
        assert high <= row.latency_s * (1 + PRICER.latency_tolerance + 1e-6)


def test_a_wider_prior_widens_the_range(graph_of):
    wider = replace(PRICER, latency_bounds_s={"relu_elements": (0.0, 1e-4)})
    relu = ops.Node(name="relu", layer=0, op=ops.Relu(rows=128, features=3072), inputs=("tokens",))
    graph = ops.OpGraph(nodes=(relu,))
    (low, high), (wide_low, wide_high) = PRICER.latency_s_range(graph), wider.latency_s_range(graph)
    assert wide_low < low
    assert high < wide_high


def test_prior_share_is_the_share_of_relus(graph_of):
    graph = graph_of("SM+LN+R")
    relus = sum(PRICER.price(node.op).latency_s for node in graph if isinstance(node.op, ops.Relu))
    assert PRICER.prior_share(graph) == pytest.approx(relus / price_of(graph).latency_s)
    assert PRICER.prior_share(graph_of("SM+ScFuFFN")) == 0.0


def test_cost_model_id_changes_with_the_coefficients(tmp_path, monkeypatch):
    changed = tmp_path / "published.yaml"
    changed.write_text(published.TESTBED.read_text() + "# a comment\n")
    monkeypatch.setattr(published, "TESTBED", changed)
    assert load_pricer().cost_model_id != PRICER.cost_model_id
