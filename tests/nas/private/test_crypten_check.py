"""What of a model's numbers does not hold under CrypTen: beyond the range of an approximation, or truncated wrongly."""

from dataclasses import replace

import numpy as np
import pytest

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import Node
from nas.private.crypten_check import FRACTION_BITS, _reach, with_precision
from nas.private.setup import resolve_setup


def reach_of(op, source, output=None):
    values = {"source": source, "op": source if output is None else output}
    return _reach(Node(name="op", layer=0, op=op, inputs=("source",)), values)


@pytest.mark.parametrize(
    ("op", "source", "what", "holds"),
    [
        (ops.RmsNorm(rows=1, features=4), np.full((1, 4), 300.0), "mean squares", True),
        (ops.RmsNorm(rows=1, features=4), np.full((1, 4), 400.0), "mean squares", False),  # 160,000 of 131,072
        (ops.LayerNorm(rows=1, features=2), np.array([[299.9, 300.1]]), "mean squares", True),
        (ops.Silu(rows=1, features=2), np.array([[-257.0, 0.0]]), "magnitudes", False),
        (ops.Tanh(rows=1, features=2), np.array([[-129.0, 0.0]]), "magnitudes", False),
        (ops.Gelu(rows=1, features=2, form="tanh"), np.array([[-50.0, 50.0]]), "", True),
        # the last key is hidden from the first query, not from the second
        (ops.Softmax(heads=1, queries=2, keys=2), np.array([[[0.0, 999.0], [0.0, 1.0]]]), "distances of scores", True),
        (ops.Softmax(heads=1, queries=2, keys=2), np.array([[[0.0, 0.0], [0.0, 257.0]]]), "distances of scores", False),
        (ops.Softmax(heads=1, queries=1, keys=2, form="power8"), np.array([[[5.0, 1.0]]]), "sums of rows", False),
        (ops.Softmax(heads=1, queries=1, keys=1, form="power8"), np.array([[[0.1]]]), "sums of rows", True),  # alone
        (ops.Softmax(heads=1, queries=1, keys=2, form="bounded"), np.array([[[-3.0, -1.0]]]), "sums of rows", True),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_what_is_approximated_must_be_in_range(op, source, what, holds):
    reach = reach_of(op, source)
    assert (reach.what, reach.holds) == (what, holds)


def test_truncated_products_are_added_up():
    assert reach_of(ops.Multiply(rows=1, features=2), np.array([[3.0, -4.0]])).truncated == 7.0
    assert reach_of(ops.Add(rows=1, features=2), np.array([[3.0, -4.0]])).truncated == 0.0
    norm = reach_of(ops.RmsNorm(rows=1, features=2), np.array([[3.0, -4.0]]), np.array([[0.5, 1.0]]))
    assert (norm.truncated, norm.summed) == (9 * 1.5, 9 + 16)  # products with 8 times the root, and with the gain
    heads = reach_of(ops.RmsNorm(rows=1, features=4, groups=2), np.array([[3.0, -4.0, 1.0, 0.0]]))
    assert (heads.least, heads.most, heads.summed) == pytest.approx((0.5, 12.5, 25.0), rel=1e-4)
    logits = ops.VocabProjection(rows=2, features=1, vocab=2)
    assert reach_of(logits, np.ones((2, 1)), np.full((2, 2), 3.0)).truncated == 6.0  # of one row


def test_the_precision_is_the_most_that_holds(export):
    setup = resolve_setup(str(export), "knee", party=None, protocol="crypten")
    assert with_precision(setup, None).setting.fraction_bits == FRACTION_BITS[0] == 16
    weights = setup.model.weights
    assert weights is not None
    loud = replace(
        setup, model=replace(setup.model, weights={**weights, "logits.weight": weights["logits.weight"] * 24e4})
    )
    assert with_precision(loud, None).setting.fraction_bits == 14
    with pytest.raises(
        UserError, match=r"with 16 fraction bits, but .* would be wrong, most in logits, where products"
    ):
        with_precision(loud, 16)
    deep = replace(
        setup, model=replace(setup.model, weights={**weights, "embed.weight": weights["embed.weight"] * 100})
    )
    with pytest.raises(
        UserError, match=r"with 24 fraction bits, but squares in final_norm sum to .*, not below 2\^15;"
    ):
        with_precision(deep, 24)
    elsewhere = replace(loud, model=replace(setup.model, weights=None))
    assert with_precision(elsewhere, None).setting.fraction_bits == 16
