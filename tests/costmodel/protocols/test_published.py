from dataclasses import MISSING, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import ops
from costmodel.calibration.fit_published import MARGINAL_S_PER_BYTE
from costmodel.cost import Budget, Price, total_price
from costmodel.estimate import estimate
from costmodel.protocols import load_pricer, published

PRICER = published.load()
FIVE_MINUTES = Budget(latency_s=300.0)
PRICED = [kind for kind in ops.OP_TYPES if kind.is_local or kind in published.COUNTS]
FREE = {ops.PositionEmbedding, ops.Rotary, ops.Temperature, ops.ScaledAdd, ops.FrozenNorm}
FREE |= {kind for kind in PRICED if kind.is_local}
DIMENSION = st.integers(1, 4096)


def an_op(kind, sizes):
    """An op of a type with the given dimensions, any value of its flags, and what else has a default."""
    others = {"bias": True, "form": "tanh", "centred": True}
    names = [field.name for field in fields(kind) if field.default is MISSING]
    dimensions = dict(zip([name for name in names if name not in others], sizes, strict=False))
    return kind(**dimensions, **{name: others[name] for name in names if name in others})


def price_of(graph):
    return total_price(PRICER.price(node.op) for node in graph)


def within(budget: Budget, price: Price) -> bool:
    return budget.admits(price)


def test_counts_are_of_known_terms():

    for kind in PRICED:
        assert set(published.counts(an_op(kind, [2] * 4))) <= set(published.TERMS)


def test_half_the_heads_have_half_the_softmax(graph_of):
    whole, half = (graph_of(name) for name in ("12xoSoRo", "12xoHoRo"))
    some, fewer = published.graph_counts(whole), published.graph_counts(half)
    for term in ("softmax_scores", "attention_elements"):
        assert fewer[term] * 2 == some[term]
    # per row and layer: 3 d less of queries, keys and values out of two linears of d in and d out
    assert some["linear_elements"] - fewer["linear_elements"] == 12 * 128 * (3 * 768 // 2 + 768 // 2)
    assert fewer["linear_rows"] == some["linear_rows"]


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


@pytest.mark.parametrize("kind", PRICED)
@given(sizes=st.lists(DIMENSION, min_size=4, max_size=4), grown=st.integers(0, 3), by=st.integers(1, 100))
def test_price_is_monotone_in_every_dimension(kind, sizes, grown, by):
    larger = [size + by * (index == grown) for index, size in enumerate(sizes)]
    small, large = PRICER.price(an_op(kind, sizes)), PRICER.price(an_op(kind, larger))
    assert large.latency_s >= small.latency_s
    assert large.sent_bytes >= small.sent_bytes


@given(rows=DIMENSION, features=DIMENSION)
def test_a_leaky_relu_costs_a_relu(rows, features):
    relu, leaky = ops.Relu(rows=rows, features=features), ops.LeakyRelu(rows=rows, features=features)
    assert PRICER.price(relu) == PRICER.price(leaky)


def test_only_latency_and_bytes_are_known():
    price = PRICER.price(ops.Softmax(heads=1, queries=1, keys=1))
    unknown = {field.name: getattr(price, field.name) for field in fields(price)}
    assert {name for name, value in unknown.items() if value is None} == set(unknown) - {"latency_s", "sent_bytes"}


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


@pytest.mark.parametrize(
    ("unscaled", "scaled"), [("12xoSoFo", "SM+ScFuFFN"), ("SM", "SM+ScFFN"), ("12xLSLGo", "12xLSLGs")]
)
def test_a_scaled_residual_costs_what_a_plain_one_costs(graph_of, unscaled, scaled):
    assert price_of(graph_of(unscaled)) == price_of(graph_of(scaled))


def test_a_packed_linear_pays_its_rows_once(graph_of):
    # Two linears of half the outputs cost one more input of 128 x 768 elements and 128 more rows.
    def linear(out_features):
        return PRICER.price(ops.Linear(rows=128, in_features=768, out_features=out_features, bias=True))

    whole, half = linear(1536), linear(768)
    for quantity in ("latency_s", "sent_bytes"):
        constants = getattr(PRICER, quantity)
        more = 128 * 768 * constants["linear_elements"] + 128 * constants["linear_rows"]
        assert 2 * getattr(half, quantity) - getattr(whole, quantity) == pytest.approx(more)


def test_gelu_instead_of_relu_costs_the_printed_difference(graph_of):
    # arXiv 2410.13060 table 3, T = 128: (25.32 - 9.44) GB over 12 x 128 x 3072 FFN elements = 3365 bytes each.
    gelu, relu = price_of(graph_of("SM+LN+G")), price_of(graph_of("SM+LN+R"))
    assert (gelu.sent_bytes - relu.sent_bytes) / (12 * 128 * 3072) == pytest.approx(3365, rel=0.002)


def test_what_fits_five_minutes_at_128_tokens(graph_of, rows):
    printed = {row.notation for row in rows if row.num_layers == 12 and row.seq_len == 128}
    fitting = {name for name in printed if within(FIVE_MINUTES, price_of(graph_of(name)))}
    assert fitting == {
        "SM+ScFuFFN",
        "SM+ScFuFFN_i6",
        "EReg(SM(t)+ScFuFFN)",
        "EReg(SM(t)+ScFuFFN_i6)",
        "HH(SM+ScFuFFN)",
        "HH(SM+ScFuFFN_i4)",
    }


def test_nothing_fits_five_minutes_at_256_tokens(graph_of):
    names = ["SM+LN+G", "SM+LN+R", "SM+ScFFN", "SM+ScFuFFN", *(f"SM+ScFuFFN_i{p}" for p in range(1, 12))]
    assert not [name for name in names if within(FIVE_MINUTES, price_of(graph_of(name, seq_len=256)))]


def test_seconds_of_nonlinear_ops_are_in_proportion_to_their_bytes():
    """Data give these seconds, and MARGINAL_S_PER_BYTE comes from other differences: they agree within 2.5 times."""
    for term in ("softmax_scores", "layernorm_elements", "gelu_elements"):
        s_per_byte = PRICER.latency_s[term] / PRICER.sent_bytes[term]
        assert MARGINAL_S_PER_BYTE / 2.5 < s_per_byte < MARGINAL_S_PER_BYTE * 2.5


def test_halving_the_vocabulary_halves_embedding_and_projection_exactly(graph_of):
    whole, half = (dict(estimate(graph_of("SM+LN+G", vocab=vocab), PRICER).by_op) for vocab in (50_000, 25_000))
    for kind in (ops.TokenEmbedding, ops.VocabProjection):
        (more,), (less,) = ([p for node, p in prices.items() if isinstance(node.op, kind)] for prices in (whole, half))
        assert (more.latency_s, more.sent_bytes) == (2 * less.latency_s, 2 * less.sent_bytes)


def test_layers_add_exactly(graph_of):
    twelve, thirteen = price_of(graph_of("SM+ScFFN")), price_of(graph_of("SM+ScFFN", layers=13))
    layer = dict(estimate(graph_of("SM+ScFFN"), PRICER).by_layer)[0]
    assert thirteen.latency_s - twelve.latency_s == layer.latency_s
    assert thirteen.sent_bytes - twelve.sent_bytes == layer.sent_bytes


@pytest.mark.parametrize(
    ("mixed", "ends"), [("6xLSLGo-6xoSoFs", ("12xLSLGo", "12xoSoFs")), ("LSLRo-oSoIs", ("SM+LN+R", "SM+ScFFN"))]
)
def test_a_mixed_placement_lies_between_its_uniform_relatives(graph_of, mixed, ends):
    middle, (dear, cheap) = price_of(graph_of(mixed)), [price_of(graph_of(end)) for end in ends]
    assert cheap.latency_s < middle.latency_s < dear.latency_s
    assert cheap.sent_bytes < middle.sent_bytes < dear.sent_bytes


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
