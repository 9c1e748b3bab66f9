from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from costmodel import ops
from costmodel.calibration.microbenchmark import plan
from costmodel.config.files import load_file
from costmodel.errors import UnpricedOpError
from costmodel.estimate import ENGINE, estimate
from costmodel.network import NETWORKS
from costmodel.ops import Node, OpGraph, shape
from costmodel.protocols import load_pricer
from costmodel.protocols.derived import (
    TESTBEDS,
    ComputeTestbed,
    KindSeconds,
    OpSeconds,
    dump_compute,
    error_s_of,
    extrapolation_of,
    fitted_kind,
    load,
    op_name,
    seconds_of,
    work,
)
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
from costmodel.protocols.sigma_primitives import SigmaSetting
from costmodel.report.estimates import estimate_tables
from search_spaces.bases import BASES
from search_spaces.lower import lower
from search_spaces.notation import parse

PROTOCOLS = list(ENGINE_PROTOCOLS)
GRAPH = lower(parse("SM+LN+G", BASES["tiny"]).architecture, 8)
SETTING = EngineSetting()
UNITS = ("elements", "rows", "products", "operands", "calls", "comparisons", "results", "switches")


@pytest.fixture(scope="module")
def testbeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One second per op and a microsecond per unit of work, ten to start; 10 % off on what was held out."""
    folder, paths = tmp_path_factory.mktemp("testbeds"), {}
    for protocol in PROTOCOLS:
        units: dict[str, Any] = {"per_unit_s": dict.fromkeys(UNITS, 1e-6), "greatest": dict.fromkeys(UNITS, 10**6)}
        every = replace(RELU, num_points=6, held_out_error=0.1, **units)
        kinds = {fitted_kind(series.sizes[0], series.weights): every for series in plan(protocol)}
        engine = ENGINE_PROTOCOLS[protocol].setting.formulas_of
        testbed = a_testbed(protocol=protocol, engine=engine, start_s=10.0, kinds=kinds)
        paths[protocol] = folder / f"{protocol}.yaml"
        paths[protocol].write_text(dump_compute(testbed))
    return paths


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_latency_is_the_sum_of_its_parts_and_ranges_as_wide_as_held_out_errors(protocol, testbeds):
    op = ops.Relu(rows=32, features=64)
    price, comm = load(protocol, "wan", testbeds[protocol]).price(op), ENGINE_PROTOCOLS[protocol].comm(op, SETTING)
    wan = NETWORKS["wan"]
    assert price.compute_s == pytest.approx(1.0 + 1e-6 * 32 * 64)
    wire_s = comm.waited_bytes * 8 / wan.bandwidth_bits_per_s + comm.rounds * wan.rtt_s / 2
    assert price.network_s == pytest.approx(wire_s)
    assert price.latency_s == price.compute_s + price.network_s
    assert price.sent_bytes == comm.online_bytes + comm.setup_bytes
    assert (price.rounds, price.messages) == (comm.rounds, comm.messages)
    whole = estimate(GRAPH, load(protocol, None, testbeds[protocol]))
    assert whole.network == "lan"
    seconds = [price.compute_s - 1.0 for _, price in whole.by_op]
    assert seconds[0] > 10.0
    assert max(seconds[1:]) < 0.5
    for name in ("latency_s", "sent_bytes", "rounds", "messages", "compute_s", "network_s"):
        parts = [getattr(price, name) for _, price in whole.by_op]
        assert sum(parts) == getattr(whole.total, name)
    whole = estimate(GRAPH, load(protocol, "lan", testbeds[protocol]))
    error_s = 0.1 * (whole.total.compute_s - 10.0)  # starting has no held-out error
    bounds = (whole.total.latency_s - error_s, whole.total.latency_s + error_s)
    assert whole.latency_s_range == pytest.approx(bounds)


def test_an_error_above_100_percent_leaves_the_network_in_the_range_and_threads_are_those_of_the_testbed(
    testbeds, tmp_path
):
    path, text = tmp_path / "rough.yaml", testbeds["semi2k"].read_text().replace("threads: 1", "threads: 4")
    path.write_text(text.replace("held_out_error: 0.1", "held_out_error: 3.0"))
    whole = estimate(GRAPH, load("semi2k", "wan", path, EngineSetting(threads=4)))
    assert whole.latency_s_range[0] == pytest.approx(whole.total.network_s + 10.0)


def test_the_fingerprint_tells_networks_testbeds_and_settings_apart(testbeds, tmp_path):
    path = testbeds["semi2k"]
    other = tmp_path / "other.yaml"
    other.write_text(path.read_text().replace("start_s: 10.0", "start_s: 11.0"))
    pricers = [
        load("semi2k", "lan", path),
        load("semi2k", "wan", path),
        load("semi2k", "lan", other),
        load("semi2k", "lan", path, EngineSetting(weights="server")),
        load("aby3", "lan", testbeds["aby3"]),
        load("semi2k", replace(NETWORKS["lan"], duplex="half"), path),
    ]
    assert len({pricer.cost_model_id for pricer in pricers}) == len(pricers)


def test_a_testbed_of_another_protocol_or_ring_and_an_unknown_network_are_refused(testbeds):
    with pytest.raises(ValueError, match=r"`protocol` of testbed .*semi2k.yaml must be aby3, but got semi2k"):
        load("aby3", None, testbeds["semi2k"])
    with pytest.raises(ValueError, match="network must be one of loopback"):
        load("semi2k", "moon", testbeds["semi2k"])
    with pytest.raises(ValueError, match="`ring_bits` of testbed .* must be 128, but got 64"):
        load("semi2k", None, testbeds["semi2k"], EngineSetting(ring_bits=128))
    usual = "a setting of type EngineSetting"
    for protocol, needs in (("semi2k", usual), ("ckks", "no setting"), ("published", "no setting")):
        with pytest.raises(ValueError, match=f"protocol {protocol} must have {needs}, but got one of type Sigma"):
            load_pricer(protocol, setting=SigmaSetting())


def test_sums_stay_exact_at_days_of_latency_and_beyond_all_numbers_are_refused(testbeds, tmp_path):
    path = tmp_path / "slow.yaml"
    path.write_text("{name: slow, bandwidth_bits_per_s: 7.777, rtt_s: 3.3, source: nobody}")
    whole = estimate(GRAPH, load("semi2k", str(path), testbeds["semi2k"]))
    assert whole.total.latency_s > 20 * 3600
    assert sum(price.latency_s for _, price in whole.by_op[::-1]) == whole.total.latency_s
    path = tmp_path / "no-link.yaml"
    path.write_text("{name: none, bandwidth_bits_per_s: 1.0e-307, rtt_s: 0.0, source: nobody}")
    with pytest.raises(ValueError, match="takes inf s on this testbed and network"):
        estimate(GRAPH, load("semi2k", str(path), testbeds["semi2k"]))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("held_out_error: 0.1", "held_out_error: .nan", "`held_out_error` must be finite and at least 0, but got nan"),
        ("rows: ", "lines: ", "of the testbed has seconds per .*, but none per rows; measure it with"),
        ("fixed_s: 1.0", "fixed_s: 1e-3", "`fixed_s` of .* must be of type float, but got '1e-3'; write 0.001"),
        ("start_s: 10.0", "", "lacks the key 'start_s'"),
        ("elements: 1.0e-06", "elements: -1.0", "`elements` must be finite and at least 0"),
        ("greatest: {", "greatest: {other: 1, ", "`greatest` must have the units of `per_unit_s`, elements, .*other"),
        (
            "SPU 0.9.5",
            "SPU 0.9.6",
            r"`engine` of testbed .*broken.yaml must be SecretFlow-SPU 0.9.5, as the formulas are, but got "
            r"SecretFlow-SPU 0.9.6; calibrate one for it\.$",
        ),
        ("threads: 1", "threads: 4", "`threads` of testbed .* must be 1, but got 4; calibrate one for it"),
    ],
)
def test_testbeds_that_cannot_be_used_are_refused(old, new, error, testbeds, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(testbeds["semi2k"].read_text().replace(old, new))
    with pytest.raises(ValueError, match=error):
        estimate(GRAPH, load("semi2k", None, path))


def test_what_does_more_than_was_measured_is_said_and_widens_the_range(testbeds):
    """At 2,000,000 elements, twice the bound: the error of 10 % counts once more."""
    pricer = load("semi2k", "loopback", testbeds["semi2k"])
    within, beyond = (
        estimate(OpGraph(nodes=(Node(name="a", layer=0, op=ops.Relu(rows=rows, features=1000), inputs=("tokens",)),)),
        pricer) for rows in (1000, 2000)
    )  # fmt: skip
    assert (within.extrapolations, within.extrapolated) == ((1.0,), ())
    assert (beyond.extrapolations, beyond.extrapolated) == ((2.0,), ("Relu 2.0x",))
    assert beyond.latency_s_range[1] == pytest.approx(beyond.total.latency_s + 0.2 * (beyond.total.compute_s or 0.0))
    kinds = estimate_tables(beyond)[1].columns[0]
    assert list(kinds.cells) == ["Relu (2.0x beyond what was measured)"]


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


def test_a_product_reads_its_operands_once_and_tiles_anew():
    """2 x 5801 times 5801 x 5600 has 5801 x 5602 operands of 8 bytes, just below 256 MiB."""
    assert work(linear(2, 5801, 5600), "semi2k", SETTING) == {
        "calls": 2,
        "elements": 2 * 2 * 5600,  # the product and its truncation
        "products": 2 * 5801 * 5600,
        "operands": 5801 * 5602,
    }
    # at 5900 columns: sqrt(2^25 x 5902 / 5801) = 5842.8, so tiles of 1 x 5744 x 5841, both rows apart
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


def test_errors_grow_by_the_held_out_one_for_each_doubling_unless_an_op_was_measured():
    within, beyond = ops.Relu(rows=10, features=10), ops.Relu(rows=40, features=10)
    assert extrapolation_of(within, "secret", a_testbed()) == 1.0
    assert error_s_of(within, "secret", a_testbed()) == pytest.approx(0.25 * 51.0)
    assert extrapolation_of(beyond, "secret", a_testbed()) == 4.0
    assert error_s_of(beyond, "secret", a_testbed()) == pytest.approx(0.25 * (1 + 2) * 201.0)
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
    with pytest.raises(UnpricedOpError, match=message):
        seconds_of(ops.Relu(rows=2, features=3), "secret", a_testbed(kinds={}, **lacking))


def test_names_of_ops_tell_all_their_fields_apart_in_a_file_too(tmp_path):
    norm = ops.LayerNorm(rows=2, features=3)
    names = {op_name(op, "secret") for op in (norm, replace(norm, affine=False), replace(norm, rows=3))}
    assert names == {
        "LayerNorm.secret(rows=2, features=3)",
        "LayerNorm.secret(rows=2, features=3, affine=False)",
        "LayerNorm.secret(rows=3, features=3)",
    }
    testbed = a_testbed(ops={"Relu(rows=1)": MEASURED}, notes=("a", "b"))
    path = tmp_path / "mine.yaml"
    path.write_text(dump_compute(testbed))
    assert load_file(ComputeTestbed, path) == testbed


# Where an op gets cheaper as it grows: from then on blocks are less deep, and a packed ciphertext takes as many key
# switches as a block is deep. By at most 70 %. The inner dimension is never among these.
PACKED = {
    ("TokenEmbedding", "tokens"), ("TokenEmbedding", "features"), ("Linear", "rows"), ("Linear", "out_features"),
    ("VocabProjection", "rows"),
}  # fmt: skip
MOST = 0.7
GROWN = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 3072, 6144)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_seconds_grow_with_every_dimension_of_every_op(protocol):
    testbed, fallen = load_file(ComputeTestbed, TESTBEDS / f"{protocol}.yaml"), set()
    for series in plan(protocol):
        for op in (series.sizes[1], series.sizes[-1]):
            for name in shape(op):
                sizes = [replace(op, **dict[str, Any]({name: value})) for value in GROWN]
                seconds = [seconds_of(sized, series.weights, testbed) for sized in sizes]
                shares = [1 - after / before for before, after in pairwise(seconds)]
                assert max(shares) < MOST, (op, name)
                fallen |= {(type(op).__name__, name)} if max(shares) > 1e-12 else set()
    assert fallen == (PACKED if protocol == "cheetah" else set())
