from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from costmodel import ops
from costmodel.calibration.microbenchmark import plan
from costmodel.ops import Op, shape
from costmodel.protocols.compute_testbed import (
    ComputeTestbed,
    KindSeconds,
    OpSeconds,
    dump_compute,
    error_s_of,
    extrapolation_of,
    fitted_kind,
    load_compute,
    op_name,
    seconds_of,
    work,
)
from costmodel.protocols.derived import TESTBEDS
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.identity import ENGINE
from costmodel.protocols.primitives import EngineSetting

SETTING = EngineSetting()
PROTOCOLS = list(ENGINE_PROTOCOLS)
RELU = KindSeconds(
    fixed_s=1.0, per_unit_s={"elements": 0.5}, greatest={"elements": 100}, num_points=3, worst_error=0.0,
    held_out_error=0.25,
)  # fmt: skip

MEASURED = OpSeconds(seconds=7.0, setup_s=1.0, spread=0.1, num_runs=3)


def a_testbed(**changes) -> ComputeTestbed:
    usual = ComputeTestbed(
        protocol="semi2k", engine=ENGINE, threads=1, machine="m", measured_on="d", ring_bits=64, fraction_bits=18,
        start_s=0.0, kinds={"Relu": RELU},
    )  # fmt: skip
    return replace(usual, **changes)


def linear(rows: int, inner: int, columns: int) -> ops.Linear:
    return ops.Linear(rows=rows, in_features=inner, out_features=columns, bias=False)


def test_a_product_that_is_not_cut_reads_its_operands_once():
    """2 x 5801 times 5801 x 5600 has 5801 x 5602 operands of 8 bytes, just below 256 MiB."""
    assert work(linear(2, 5801, 5600), "semi2k", SETTING) == {
        "calls": 2,
        "elements": 2 * 2 * 5600,  # the product and its truncation
        "products": 2 * 5801 * 5600,
        "operands": 5801 * 5602,
    }


def test_tiles_read_their_operands_anew():
    """At 5900 columns: sqrt(2^25 x 5902 / 5801) = 5842.8, so tiles of 1 x 5744 x 5841, both rows apart."""
    tiled = work(linear(2, 5801, 5900), "semi2k", SETTING)
    assert (tiled["calls"], tiled["products"]) == (2 * 2 * 2 + 1, 2 * 5801 * 5900)
    assert tiled["operands"] == 2 * 5801 * 5900 + 2 * 2 * 5801  # the right factor for each row, rows for both columns
    assert tiled["operands"] / work(linear(2, 5801, 5600), "semi2k", SETTING)["operands"] > 2


def test_all_matrix_products_are_one_kind():
    products = {
        series.kind for series in plan("semi2k") if fitted_kind(series.sizes[0], series.weights)[:6] == "Matmul"
    }
    assert products == {
        "AttentionScores", "AttentionMix", "Linear.secret", "Linear.server", "VocabProjection.secret",
        "VocabProjection.server", "TokenEmbedding.one-hot.secret", "TokenEmbedding.one-hot.server",
    }  # fmt: skip
    assert fitted_kind(ops.AttentionMix(heads=1, queries=2, keys=2, head_dim=2), "server") == "Matmul.secret"
    assert fitted_kind(linear(1, 1, 1), "server") == "Matmul.server"


def test_errors_grow_by_the_held_out_one_for_each_doubling():
    within, beyond = ops.Relu(rows=10, features=10), ops.Relu(rows=40, features=10)
    assert extrapolation_of(within, "secret", a_testbed()) == 1.0
    assert error_s_of(within, "secret", a_testbed()) == pytest.approx(0.25 * 51.0)
    assert extrapolation_of(beyond, "secret", a_testbed()) == 4.0
    assert error_s_of(beyond, "secret", a_testbed()) == pytest.approx(0.25 * (1 + 2) * 201.0)


def test_an_op_that_was_measured_takes_the_seconds_measured():
    op = ops.Relu(rows=1000, features=10)
    testbed = a_testbed(ops={op_name(op, "secret"): MEASURED})
    assert seconds_of(op, "secret", testbed) == 7.0
    assert error_s_of(op, "secret", testbed) == pytest.approx(0.7)
    assert extrapolation_of(op, "secret", testbed) == 1.0
    assert seconds_of(ops.Relu(rows=1000, features=11), "secret", testbed) == 5501.0


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ({"ops": {"x": MEASURED}}, r"no seconds for Relu\(rows=2, features=3\); measure it with .* with --for"),
        ({}, r"no seconds for Relu; measure it with `python -m costmodel calibrate"),
    ],
)
def test_a_testbed_names_the_op_or_kind_that_it_lacks_and_how_to_measure_it(lacking, message):
    with pytest.raises(ValueError, match=message):
        seconds_of(ops.Relu(rows=2, features=3), "secret", a_testbed(kinds={}, **lacking))


def test_names_of_ops_tell_all_their_fields_apart():
    norm = ops.LayerNorm(rows=2, features=3)
    names = {op_name(op, "secret") for op in (norm, replace(norm, affine=False), replace(norm, rows=3))}
    assert names == {
        "LayerNorm.secret(rows=2, features=3)",
        "LayerNorm.secret(rows=2, features=3, affine=False)",
        "LayerNorm.secret(rows=3, features=3)",
    }


def test_a_testbed_with_single_ops_survives_its_file(tmp_path):
    testbed = a_testbed(ops={"Relu(rows=1)": MEASURED}, notes=("a", "b"))
    path = tmp_path / "mine.yaml"
    path.write_text(dump_compute(testbed))
    assert load_compute(path) == testbed


def test_bounds_must_be_of_the_units_that_are_measured():
    with pytest.raises(ValueError, match="`greatest` must have the units of `per_unit_s`, elements, but has rows"):
        replace(RELU, greatest={"rows": 1})


def test_seconds_never_fall_as_an_op_grows():
    with pytest.raises(ValueError, match="`elements` must be finite and at least 0"):
        replace(RELU, per_unit_s={"elements": -1.0})


# Where an op gets cheaper as it grows: from then on blocks are less deep, and a packed ciphertext takes as many key
# switches as a block is deep. By at most 70 %. The inner dimension is never among these.
PACKED = {
    ("TokenEmbedding", "tokens"), ("TokenEmbedding", "features"), ("Linear", "rows"), ("Linear", "out_features"),
    ("VocabProjection", "rows"),
}  # fmt: skip
MOST = 0.7
GROWN = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 3072, 6144)


def falls(testbed: ComputeTestbed, weights: str, op: Op) -> list[tuple[str, float, Op]]:
    """Dimension, share of the seconds lost and op, of every step up at which seconds fall."""
    steps = []
    for name in shape(op):
        for smaller, larger in pairwise(replace(op, **dict[str, Any]({name: value})) for value in GROWN):
            before, after = (seconds_of(sized, weights, testbed) for sized in (smaller, larger))
            if after < before * (1 - 1e-12):
                steps.append((name, 1 - after / before, larger))
    return steps


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_seconds_grow_with_every_dimension_of_every_op(protocol):
    testbed = load_compute(TESTBEDS / f"{protocol}.yaml")
    for series in plan(protocol):
        for op in (series.sizes[1], series.sizes[-1]):
            for name, share, larger in falls(testbed, series.weights, op):
                assert protocol == "cheetah", larger
                assert (type(op).__name__, name) in PACKED, larger
                assert share < MOST, larger


def test_the_exceptions_are_needed():
    some = [series for series in plan("cheetah") if type(series.sizes[0]).__name__ in dict(PACKED)]
    testbed = load_compute(TESTBEDS / "cheetah.yaml")
    exceptions = {
        (type(op).__name__, name)
        for series in some
        for op in (series.sizes[1], series.sizes[-1])
        for name, _, _ in falls(testbed, series.weights, op)
    }
    assert exceptions == PACKED
