import csv
import io
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from costmodel import ops
from costmodel.calibration.fits import fit_memory
from costmodel.deployment.deploy import Deployment
from costmodel.engine.children import own_children
from costmodel.engine.compare import compare, predict
from costmodel.execution import interpreter
from costmodel.execution.memory import (
    FEATURES,
    alive_bytes,
    features,
    held_bytes,
    last_readers,
    load_memory,
    peak_memory,
)
from costmodel.ops import Node, OpGraph
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse
from tests.small_models import GPT2, PYTHIA

SETTING = EngineSetting()
TOLERANCE = 0.15


def node(name: str, op: ops.Op, *inputs: str) -> Node:
    return Node(name=name, layer=0, op=op, inputs=inputs)


CHAIN = OpGraph(
    nodes=(
        node("embed", ops.TokenEmbedding(tokens=2, vocab=5, features=3), "tokens"),
        node("up", ops.Linear(rows=2, in_features=3, out_features=7, bias=True), "embed"),
        node("relu", ops.Relu(rows=2, features=7), "up"),
        node("down", ops.Linear(rows=2, in_features=7, out_features=3, bias=False), "relu"),
        node("sum", ops.Add(rows=2, features=3), "embed", "down"),
    )
)


def test_an_output_is_kept_until_its_last_reader_is_done():
    assert last_readers(CHAIN.nodes) == {
        "embed": [], "up": [], "relu": ["up"], "down": ["relu"], "sum": ["embed", "down"],
    }  # fmt: skip


def test_shares_are_counted_by_hand():
    """In elements: 6 of the embedding stay for the sum; 14 before and after the ReLU; two shares each under aby3."""
    alive = [6, 6 + 14, 6 + 14 + 14, 6 + 14 + 6, 6 + 6 + 6]
    weights, one_hot = 5 * 3 + (3 * 7 + 7) + 7 * 3, 2 * 5
    for protocol, share_bytes in {"semi2k": 8, "aby3": 16, "cheetah": 8}.items():
        assert alive_bytes(CHAIN, protocol, SETTING) == tuple(share_bytes * elements for elements in alive)
        assert held_bytes(CHAIN, protocol, SETTING) == share_bytes * (weights + one_hot)
    counts = features(CHAIN, "semi2k", SETTING)
    assert counts["matrix"] == 8 * (2 * 7 + 7 * 3 + 2 * 3)  # of `down`, larger than `up` by nothing but its result
    assert (counts["blocks"], counts["results"]) == (0, 0)
    wide = OpGraph(nodes=(node("wide", ops.Linear(rows=32, in_features=64, out_features=1000, bias=False), "tokens"),))
    encrypted = features(wide, "cheetah", SETTING)  # blocks of 32 x 64 x 4, of which 250 make up the columns
    assert (encrypted["blocks"], encrypted["results"]) == (250 * 8192 * 8, 250 * 2 * 8192 * 8)


@pytest.mark.parametrize(
    ("base", "name", "deployment"),
    [
        (GPT2, "SM(t)+LN+G", Deployment()),
        (GPT2, "HH(SM(t)+G)", Deployment(phase="decode")),
        (PYTHIA, "SM+LN+R", Deployment(batch=3, vocab_blocks=2)),
        (GPT2, "SM+LN+R", Deployment(projection="last", rows="needed", query_block=2)),
    ],
)
def test_counts_are_those_of_the_arrays_that_a_run_has(base, name, deployment):
    from costmodel.engine.compare import drawn_caches, drawn_tokens, drawn_weights

    graph, generator = lower(parse(name, base).architecture, 7, deployment), np.random.default_rng(0)
    weights, tokens = drawn_weights(graph, generator), drawn_tokens(graph, generator)
    caches = drawn_caches(graph, generator)
    operands = [value for node in graph for value in interpreter.operands(node, weights).values()]
    arrays = [*interpreter.inputs(graph, tokens, caches).values(), *operands]
    assert held_bytes(graph, "semi2k", SETTING) == 8 * sum(value.size for value in arrays)
    values, spent, sizes = interpreter.values(graph, weights, tokens, caches), last_readers(graph.nodes), []
    there: dict[str, int] = {}
    for op_node in graph:
        there[op_node.name] = values[op_node.name].size
        sizes.append(8 * sum(there.values()))
        for name in spent[op_node.name]:
            del there[name]
    assert alive_bytes(graph, "semi2k", SETTING) == tuple(sizes)


def test_estimates_have_the_memory_of_engines_alone(run):
    flags = ("estimate", "SM+LN+R", "--base=tiny", "--seq-len=6")
    graph = lower(parse("SM+LN+R", base_architecture("tiny")).architecture, 6)
    predicted = peak_memory(graph, SETTING, load_memory("aby3"))
    memory = json.loads(run(*flags, "--protocol=aby3", "--format=json")[1])["memory"]
    assert predicted is not None
    assert memory == asdict(predicted)
    assert json.loads(run(*flags, "--format=json")[1])["memory"] is None
    assert "peak memory of a party: 2" in run(*flags, "--protocol=aby3")[1]
    rows = list(csv.DictReader(io.StringIO(run(*flags, "--protocol=aby3", "--format=csv")[1])))
    assert max(int(row["held_bytes"]) for row in rows) == predicted.held_bytes
    longer = json.loads(run(*flags, "--protocol=aby3", "--format=json", "--new-tokens=50")[1])["memory"]
    assert longer["held_bytes"] > 0


def test_a_fit_finds_what_it_is_given():
    draw = np.random.default_rng(0).integers
    counts = [dict(zip(FEATURES, (1, *draw(1, 9, size=5) * 10**7), strict=True)) for _ in range(9)]
    wanted = dict(zip(FEATURES, (2.5e8, 1.5, 2.0, 7.0, 3.0, 0.0), strict=True))
    peaks = [round(sum(wanted[name] * count[name] for name in FEATURES)) for count in counts]
    testbed = fit_memory("semi2k", counts, [(2 * peak, peak) for peak in peaks])
    assert testbed.party.coefficients == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    assert testbed.client.coefficients["held"] == pytest.approx(3.0, rel=1e-3)
    assert testbed.party.held_out_error < 1e-3
    assert testbed.greatest["held"] == max(count["held"] for count in counts)
    off = fit_memory("semi2k", counts, [(peak, peak) for peak in [2 * peaks[0], *peaks[1:]]])
    assert off.party.held_out_error > 0.2


def test_what_nobody_measured_is_not_predicted_and_what_is_beyond_is_told():
    testbed = load_memory("semi2k")
    small, large = (lower(parse("SM+LN+R", base_architecture("gpt2-small")).architecture, n) for n in (2, 1024))
    assert peak_memory(small, EngineSetting(weight_masks="kept"), testbed) is None
    assert peak_memory(small, EngineSetting(ring_bits=128, fraction_bits=40), testbed) is None
    assert peak_memory(small, EngineSetting(threads=2), testbed) is None
    less, more = (peak_memory(graph, SETTING, testbed) for graph in (small, large))
    assert less.held_bytes < less.party_bytes < more.party_bytes
    assert more.extrapolation > less.extrapolation > 1
    tiny = lower(parse("SM", GPT2).architecture, 4)
    assert (memory := peak_memory(tiny, SETTING, testbed)) is not None
    assert memory.extrapolation == 1


@pytest.mark.parametrize("protocol", list(ENGINE_PROTOCOLS))
def test_committed_fits_are_within_the_bar_on_models_that_were_left_out(protocol):
    testbed = load_memory(protocol)
    assert testbed.protocol == protocol
    assert max(testbed.client.held_out_error, testbed.party.held_out_error) < TOLERANCE


@pytest.mark.parametrize("protocol", ["semi2k", "aby3", pytest.param("cheetah", marks=pytest.mark.slow)])
def test_prediction_is_near_what_the_parties_hold(protocol):
    pytest.importorskip("spu")
    base = base_architecture("gpt2-small", Dimensions(layers=1, heads=4, d_model=192, vocab=500))
    graph = lower(parse("SM+LN+R", replace(base)).architecture, 16)
    with own_children():  # what a process did before is in its memory
        comparison = compare(graph, predict(graph, protocol, SETTING), protocol=protocol, setting=SETTING)
    if None in comparison.peak_bytes:
        pytest.skip("this system does not tell")
    client, *others = comparison.peak_bytes
    assert comparison.memory.client_bytes == pytest.approx(client, rel=TOLERANCE)
    assert all(comparison.memory.party_bytes == pytest.approx(peak, rel=TOLERANCE) for peak in others)
