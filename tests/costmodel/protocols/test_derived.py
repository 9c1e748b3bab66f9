from dataclasses import replace
from pathlib import Path

import pytest

from costmodel import ops
from costmodel.calibration.microbenchmark import plan
from costmodel.estimate import estimate
from costmodel.network import NETWORKS
from costmodel.ops import Node, OpGraph
from costmodel.protocols import load_pricer
from costmodel.protocols.compute_testbed import ComputeTestbed, KindSeconds, dump_compute, fitted_kind
from costmodel.protocols.derived import load
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
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
        kinds = {
            fitted_kind(series.sizes[0], series.weights): KindSeconds(
                fixed_s=1.0,
                per_unit_s=dict.fromkeys(UNITS, 1e-6),
                greatest=dict.fromkeys(UNITS, 10**6),
                num_points=6,
                worst_error=0.0,
                held_out_error=0.1,
            )
            for series in plan(protocol)
        }
        testbed = ComputeTestbed(
            protocol=protocol, engine=ENGINE_PROTOCOLS[protocol].setting.formulas_of, threads=1, machine="m",
            measured_on="d", ring_bits=64, fraction_bits=18, start_s=10.0, kinds=kinds,
        )  # fmt: skip
        paths[protocol] = folder / f"{protocol}.yaml"
        paths[protocol].write_text(dump_compute(testbed))
    return paths


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_latency_is_the_sum_of_its_parts(protocol, testbeds):
    op = ops.Relu(rows=32, features=64)
    price, comm = load(protocol, "wan", testbeds[protocol]).price(op), ENGINE_PROTOCOLS[protocol].comm(op, SETTING)
    wan = NETWORKS["wan"]
    assert price.compute_s == pytest.approx(1.0 + 1e-6 * 32 * 64)
    wire_s = comm.waited_bytes * 8 / wan.bandwidth_bits_per_s + comm.rounds * wan.rtt_s / 2
    assert price.network_s == pytest.approx(wire_s)
    assert price.latency_s == price.compute_s + price.network_s
    assert price.sent_bytes == comm.online_bytes + comm.setup_bytes
    assert (price.rounds, price.messages) == (comm.rounds, comm.messages)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_decoder_starts_once_and_adds_up_exactly(protocol, testbeds):
    whole = estimate(GRAPH, load(protocol, None, testbeds[protocol]))
    assert whole.network == "lan"
    seconds = [price.compute_s - 1.0 for _, price in whole.by_op]
    assert seconds[0] > 10.0
    assert max(seconds[1:]) < 0.5
    for name in ("latency_s", "sent_bytes", "rounds", "messages", "compute_s", "network_s"):
        parts = [getattr(price, name) for _, price in whole.by_op]
        assert sum(parts) == getattr(whole.total, name)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_range_is_as_wide_as_held_out_errors(protocol, testbeds):
    whole = estimate(GRAPH, load(protocol, "lan", testbeds[protocol]))
    error_s = 0.1 * (whole.total.compute_s - 10.0)  # starting has no held-out error
    bounds = (whole.total.latency_s - error_s, whole.total.latency_s + error_s)
    assert whole.latency_s_range == pytest.approx(bounds)


def test_an_error_above_100_percent_leaves_the_network_in_the_range(testbeds, tmp_path):
    path = tmp_path / "rough.yaml"
    path.write_text(testbeds["semi2k"].read_text().replace("held_out_error: 0.1", "held_out_error: 3.0"))
    whole = estimate(GRAPH, load("semi2k", "wan", path))
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


def test_a_testbed_of_another_protocol_and_an_unknown_network_are_refused(testbeds):
    with pytest.raises(ValueError, match=r"`protocol` of testbed .*semi2k.yaml must be aby3, but got semi2k"):
        load("aby3", None, testbeds["semi2k"])
    with pytest.raises(ValueError, match="network must be one of loopback"):
        load("semi2k", "moon", testbeds["semi2k"])


def test_sums_stay_exact_at_days_of_latency(testbeds, tmp_path):
    path = tmp_path / "slow.yaml"
    path.write_text("{name: slow, bandwidth_bits_per_s: 7.777, rtt_s: 3.3, source: nobody}")
    whole = estimate(GRAPH, load("semi2k", str(path), testbeds["semi2k"]))
    assert whole.total.latency_s > 20 * 3600
    assert sum(price.latency_s for _, price in whole.by_op[::-1]) == whole.total.latency_s


def test_seconds_beyond_all_numbers_are_refused(testbeds, tmp_path):
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


def test_a_testbed_of_another_ring_is_refused(testbeds):
    with pytest.raises(ValueError, match="`ring_bits` of testbed .* must be 128, but got 64"):
        load("semi2k", None, testbeds["semi2k"], EngineSetting(ring_bits=128))


def test_a_testbed_of_several_threads_prices_as_many(testbeds, tmp_path):
    path = tmp_path / "four.yaml"
    path.write_text(testbeds["semi2k"].read_text().replace("threads: 1", "threads: 4"))
    assert load("semi2k", None, path, EngineSetting(threads=4)).price(ops.Relu(rows=1, features=1)).compute_s > 1.0


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


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_committed_testbeds_price_every_kind(protocol):
    pricer = load_pricer(protocol)
    for series in plan(protocol):
        assert 0 < pricer.price(series.sizes[-1]).latency_s < 3600
