import math
from dataclasses import MISSING, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel import ops
from costmodel.config.files import load_file
from costmodel.cost import Budget, total_price
from costmodel.protocols import load_pricer, published
from costmodel.protocols.linear_fit import extremes, fit

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


def test_counts_are_of_known_terms_and_an_unknown_op_is_never_free():
    for kind in PRICED:
        assert set(published.counts(an_op(kind, [2] * 4))) <= set(published.TERMS)

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
        *("SM+ScFuFFN", "SM+ScFuFFN_i6", "EReg(SM(t)+ScFuFFN)", "EReg(SM(t)+ScFuFFN_i6)"),
        *("HH(SM+ScFuFFN)", "HH(SM+ScFuFFN_i4)"),
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


def test_a_wider_prior_widens_the_range():
    wider = replace(PRICER, latency_bounds_s={"relu_elements": (0.0, 1e-4)})
    relu = ops.Node(name="relu", layer=0, op=ops.Relu(rows=128, features=3072), inputs=("tokens",))
    graph = ops.OpGraph(nodes=(relu,))
    (low, high), (wide_low, wide_high) = PRICER.latency_s_range(graph), wider.latency_s_range(graph)
    assert wide_low < low
    assert high < wide_high


def test_every_constant_says_what_identifies_it_has_bounds_and_changes_the_cost_model_id(tmp_path, monkeypatch):
    changed = tmp_path / "published.yaml"
    changed.write_text(published.TESTBED.read_text() + "# a comment\n")
    monkeypatch.setattr(published, "TESTBED", changed)
    assert load_pricer().cost_model_id != PRICER.cost_model_id
    testbed = load_file(published.Testbed, published.TESTBED)
    for constants in (testbed.sent_bytes, testbed.latency_s):
        assert constants.keys() == published.TERMS.keys()
        for constant in constants.values():
            low, high = constant.low or 0.0, constant.high or math.inf
            assert 0 <= low <= constant.value <= high
            assert (constant.low is None, constant.high is None) == (constant.identified_by == "data",) * 2
            assert constant.source
    assert all(row.counts.keys() == published.TERMS.keys() for row in testbed.rows)
    assert {term for term, constant in testbed.latency_s.items() if constant.identified_by == "prior"} == {
        "relu_elements"
    }
    assert testbed.not_identified


ROWS = [{"a": 1_000_000, "b": 3}, {"a": 2_000_000, "b": 1}, {"a": 500_000, "b": 7}]


@given(a=st.floats(1e-9, 1e3), b=st.floats(1.0, 1e9))
def test_exact_coefficients_are_found_whatever_their_scale(a, b):
    targets = [a * row["a"] + b * row["b"] for row in ROWS]
    coefficients = fit(ROWS, targets, fixed={})
    assert [sum(coefficients[term] * row[term] for term in row) for row in ROWS] == pytest.approx(targets, rel=1e-5)


def test_the_mean_relative_error_is_least():
    """One coefficient, counts 1, targets 100, 100, 110: the median 100 errs by 0, 0 and 10/110."""
    assert fit([{"a": 1}] * 3, [100.0, 100.0, 110.0], {})["a"] == pytest.approx(100)


def test_given_coefficients_stay_as_they_are_and_none_is_negative():
    targets = [5.0 * row["a"] + 2.0 * row["b"] for row in ROWS]
    assert fit(ROWS, targets, fixed={"b": 2.0}) == {"b": 2.0, "a": pytest.approx(5.0)}
    assert fit([{"a": 1, "b": 1}, {"a": 1, "b": 2}], [10.0, 1.0], fixed={})["b"] == 0.0


def test_extremes_by_hand_and_rows_that_contradict_each_other():
    # a in [9, 11] from the row; 2 a in [18, 22].
    assert extremes({"a": 2}, [{"a": 1}], [10.0], 0.1, {}) == pytest.approx((18.0, 22.0))
    # a + b in [9, 11] with b in [1, 2] leaves a in [7, 10].
    low, high = extremes({"a": 1, "b": 0}, [{"a": 1, "b": 1}], [10.0], 0.1, {"b": (1.0, 2.0)})
    assert (low, high) == pytest.approx((7.0, 10.0))
    assert extremes({"a": 1, "b": 1}, [{"a": 1, "b": 0}], [10.0], 0.1, {})[1] == math.inf
    with pytest.raises(ValueError, match=r"no coefficients reproduce every row within 1\.0%"):
        extremes({"a": 1}, [{"a": 1}, {"a": 1}], [10.0, 20.0], 0.01, {})
