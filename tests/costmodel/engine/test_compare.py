import json
import re
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import save_file

from costmodel import ops
from costmodel.config.files import load_file
from costmodel.deployment.deploy import Deployment
from costmodel.engine import compare, registry, spu
from costmodel.engine.party import OpCost
from costmodel.engine.session import StepRun
from costmodel.engine.spu import MeasuredRounds
from costmodel.errors import UserError
from costmodel.execution import interpreter
from costmodel.ops import Node, OpGraph
from costmodel.protocols import derived
from costmodel.protocols.derived import ComputeTestbed, dump_compute
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import NOTHING, EngineSetting
from costmodel.report import comparisons
from costmodel.report.estimates import PRICE_KEYS
from tests.costmodel.conftest import refused

TINY = ("--base", "tiny", "--layers", "1", "--vocab", "40", "--seq-len", "6")
SECRET = ("SM(t)+ScFuFFN", "--layers", "1", "--weights", "secret", "--embedding", "one-hot")
AT_SERVER = ("SM(t)+ScFuFFN", "--layers", "1", "--weights", "server", "--embedding", "lookup")
EVERY_CHOICE = ("1xMSlRo-1xmHoXo-1xoQoPo-1xoUoEo-1xooMKo-l", "--layers", "5", "--heads", "4")
LOGIT_TOLERANCE = 0.02
CHEETAH_SMALL_OP_TOLERANCE = 3e-3  # answers of few elements compress worse: a linear of 640 kB takes 0.3 % more


@pytest.fixture
def no_engine(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)


@pytest.fixture
def engine_stub(monkeypatch):
    """An engine that computes in the clear, is off by 0.25 in one logit, and sends 3 bytes in 2 messages per op."""

    def run_stub(graph, weights, tokens, caches, *, protocol, setting):
        logits = interpreter.execute(graph, weights, tokens, caches)
        logits[0, logits[0].argmin()] -= 0.25
        costs = tuple(OpCost(3, 2, start_s, start_s + 0.1, None) for start_s, _ in enumerate(graph))
        return StepRun(by_party=(costs,), seconds=1.0, logits=logits)

    monkeypatch.setattr("costmodel.commands.compare.check_installed", lambda protocol: None)
    monkeypatch.setattr(spu, "run", run_stub)
    monkeypatch.setattr(comparisons, "version", lambda package: "0.0")


def check_document(document, protocol):
    head = ["architecture", "base", "seq_len", "protocol", "network", "trust"]
    assert list(document) == [*head, "total", "by_op", "on_network", "setting", "memory"]
    assert document["trust"]["dealer"] == (protocol == "semi2k")
    assert (document["protocol"], document["network"], document["seq_len"]) == (protocol, None, 6)
    total, by_op = document["total"], document["by_op"]
    assert list(total) == ["predicted", "measured", "logits_max_abs_error", "top1_agreement"]
    assert list(total["predicted"]) == [*PRICE_KEYS, "latency_s_range"]
    assert list(total["measured"]) == [*PRICE_KEYS, "rounds_reason"]
    for entry in by_op:
        assert list(entry) == ["op", "layer", "name", "shape", "predicted", "measured"]
        assert list(entry["predicted"]) == list(entry["measured"]) == list(PRICE_KEYS)
    for side, known in (
        ("predicted", set(PRICE_KEYS) - {"key_bytes"}),
        ("measured", {"messages", "sent_bytes", "latency_s"}),
    ):
        for key in PRICE_KEYS:
            parts = [entry[side][key] for entry in by_op]
            assert (sum(parts) if key in known else None) == total[side][key]
            assert key in known or set(parts) == {None}
    assert total["measured"]["rounds_reason"] == "the engine counts messages, not rounds"
    assert (document["setting"]["ring_bits"], document["setting"]["fraction_bits"]) == (64, 18)


def setting_of(run, *args):
    code, out, _ = run("compare", "SM", *TINY, "--format", "json", *args)
    assert code == 0
    setting = json.loads(out)["setting"]
    common = list(setting)[1 : list(setting).index("weights_seed")]
    priced = json.loads(run("estimate", "SM", *TINY, "--format", "json", "--protocol", "semi2k")[1])["setting"]
    assert common == list(priced)  # `estimate` says the same
    names = ("weights", "weights_seed", "embedding", "projection", "phase", "ring_bits", "fraction_bits")
    return [setting[name] for name in names]


def test_json_records_the_setting(run, engine_stub):
    assert setting_of(run) == ["secret", 0, "one-hot", "all", "prefill", 64, 18]
    changed = ("--weights", "server", "--projection", "last", "--fraction-bits", "15")
    assert setting_of(run, *changed) == ["server", 0, "one-hot", "last", "prefill", 64, 15]
    assert setting_of(run, "--phase", "decode", "--embedding", "lookup")[2:5] == ["lookup", "all", "decode"]


def test_json_has_every_key_and_sums(run, engine_stub):
    code, out, err = run("compare", "SM+LN+G", *TINY, "--format", "json")
    document = json.loads(out)
    assert (code, err) == (0, "running 16 ops under the engine, 492.62 kB to send\n")
    check_document(document, "semi2k")
    assert (document["architecture"], document["base"]) == ("SM+LN+G", "tiny")
    assert document["total"]["measured"]["sent_bytes"] == 3 * len(document["by_op"]) == 48
    assert document["total"]["logits_max_abs_error"] == pytest.approx(0.25)
    assert document["total"]["top1_agreement"] == 1.0


def test_delays_measure_rounds(run, engine_stub, monkeypatch):
    def measured(job, *, delays_s):
        slopes = tuple(float(index) for index, _ in enumerate(job.client.graph_of(1, Deployment())))
        return MeasuredRounds(by_op=slopes, seconds=tuple((delay_s, 1.0) for delay_s in delays_s), residual_s=0.5)

    monkeypatch.setattr(spu, "measured_rounds", measured)
    code, out, _ = run("compare", "SM", *TINY, "--delays", "10ms,20ms,40ms", "--format", "json")
    assert code == 0
    document = json.loads(out)
    by_op = [entry["measured"]["rounds"] for entry in document["by_op"]]
    assert by_op == [float(index) for index, _ in enumerate(by_op)]
    assert document["total"]["measured"]["rounds"] == sum(by_op)
    assert document["total"]["measured"]["rounds_reason"] is None
    assert document["setting"]["delays_s"] == [0.01, 0.02, 0.04]


@pytest.mark.parametrize("form", ["table", "csv"])
def test_a_table_has_every_op_kind_and_the_total(run, engine_stub, snapshot, form):
    """The stub sends where a residual sum is predicted to be local."""
    code, out, _ = run("compare", "SM+LN+G", *TINY, "--format", form)
    assert code == 0
    snapshot(f"compared-{form}", out)


def test_seconds_on_another_network_are_predicted_beside(run, engine_stub):
    document = json.loads(run("compare", "SM", *TINY, "--format", "json")[1])
    assert document["on_network"] is None
    link = ("--bandwidth", "1Gbps", "--rtt", "4ms")
    document = json.loads(run("compare", "SM", *TINY, *link, "--format", "json")[1])
    predicted, here = document["on_network"]["predicted"], document["total"]["predicted"]
    assert (document["on_network"]["network"], document["network"]) == ("1Gbps 4ms", None)
    assert predicted["compute_s"] == pytest.approx(here["compute_s"])
    assert predicted["network_s"] > here["rounds"] * 0.002
    _, out, _ = run("compare", "SM", *TINY, *link)
    assert "\npredicted on 1Gbps 4ms, not measured: " in out


def test_a_testbed_of_ones_own_predicts_the_seconds_and_their_range(run, engine_stub, tmp_path):
    """One that takes a second longer to start."""
    committed = load_file(ComputeTestbed, derived.TESTBEDS / "semi2k.yaml")
    options = ("compare", "SM", *TINY, "--format", "json")
    usual = json.loads(run(*options)[1])["total"]["predicted"]
    priced = json.loads(run("estimate", "SM", *TINY, "--format", "json", "--protocol=semi2k", "--network=loopback")[1])
    assert usual["latency_s_range"] == priced["total"]["latency_s_range"]
    assert usual["latency_s"] == pytest.approx(priced["total"]["latency_s"])
    (tmp_path / "slow.yaml").write_text(dump_compute(replace(committed, start_s=committed.start_s + 1.0)))
    slower = json.loads(run(*options, "--testbed", "slow.yaml")[1])["total"]["predicted"]
    assert slower["latency_s_range"] == pytest.approx([seconds + 1.0 for seconds in usual["latency_s_range"]], abs=1e-4)
    assert slower["latency_s"] == pytest.approx(usual["latency_s"] + 1.0, abs=1e-4)
    assert "predicted on testbed slow.yaml" in run("compare", "SM", *TINY, "--testbed", "slow.yaml")[1]
    said = refused(run(*options, "--testbed", "slow.yaml", "--protocol", "aby3"))
    assert "`protocol` of testbed slow.yaml must be aby3" in said


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("semi2k", SECRET),
        ("aby3", AT_SERVER),
        *product(("semi2k", "aby3", "cheetah"), (EVERY_CHOICE,)),
        *(pytest.param(name, AT_SERVER, marks=pytest.mark.slow) for name in ("semi2k", "cheetah")),
    ],
)
def test_the_engine_agrees(run, protocol, options):
    small, whole = (CHEETAH_SMALL_OP_TOLERANCE, 1e-3) if protocol == "cheetah" else (0, 0)
    code, out, err = run("compare", *options, *TINY[:2], *TINY[4:], "--protocol", protocol, "--format", "json")
    assert (code, err.count("\n")) == (0, 1)
    document = json.loads(out)
    check_document(document, protocol)
    if options == EVERY_CHOICE:
        assert (document["architecture"], document["total"]["top1_agreement"]) == (options[0], 1.0)
        assert {"RmsNorm", "FrozenNorm", "Square"} < {entry["op"] for entry in document["by_op"]}
    for entry in document["by_op"]:
        predicted, measured = entry["predicted"], entry["measured"]
        assert predicted["messages"] == measured["messages"]
        slack = small * measured["sent_bytes"] + 1000 * bool(small)
        assert abs(predicted["sent_bytes"] - measured["sent_bytes"]) <= slack
    predicted, measured = document["total"]["predicted"], document["total"]["measured"]
    assert predicted["sent_bytes"] == pytest.approx(measured["sent_bytes"], rel=whole)
    assert document["total"]["logits_max_abs_error"] < LOGIT_TOLERANCE
    assert measured["latency_s"] > 0


def test_an_op_that_cannot_be_run_is_named_before_the_engine_starts(monkeypatch):
    relu, wide = ops.Relu(rows=2, features=2), ops.TokenEmbedding(tokens=2, vocab=5, features=4)
    graph = OpGraph(
        nodes=(
            Node(name="table", layer="embed", op=wide, inputs=("tokens",)),
            Node(name="relu", layer=0, op=relu, inputs=("table",)),
        )
    )
    monkeypatch.setattr(spu, "run", lambda *args, **options: pytest.fail("the engine was started"))
    setting = EngineSetting()
    with pytest.raises(UserError) as refusal:
        compare.compare(graph, compare.predict(graph, "semi2k", setting), protocol="semi2k", setting=setting)
    assert str(refusal.value) == (
        "Relu 'relu' must read 'table' of shape (2, 4) as ((2, 2),), but no op takes that part of it; use a linear of "
        "its own for each part in the module, or only `estimate` its cost."
    )


@pytest.mark.needs_engine
def test_a_crash_of_the_engine_is_one_line_with_its_op(run, monkeypatch):
    # the prediction refuses a ring in which the engine cannot divide; without it, the engine fails
    unpriced = replace(ENGINE_PROTOCOLS["semi2k"], comm=lambda op, setting: NOTHING)
    monkeypatch.setitem(ENGINE_PROTOCOLS, "semi2k", unpriced)
    code, out, err = run("compare", "SM", *TINY, "--ring-bits", "32", "--fraction-bits", "8")
    assert (code, out) == (1, "")
    said = r"^error: the engine failed at party [01] in op 'layers.0.attention.softmax': .*FM32"
    assert re.search(said, err, re.MULTILINE)
    assert "Traceback" not in err


@pytest.fixture
def weights_of_sm(graph_of):
    graph = graph_of("SM", seq_len=6, base="tiny", layers=1, vocab=40)
    drawn = compare.drawn_weights(graph, np.random.default_rng(1))
    return {name: value.astype(np.float32) for name, value in drawn.items()}


def test_weights_come_from_a_file(run, engine_stub, tmp_path, weights_of_sm):
    weights_of_sm["position.weight"] = np.tile(weights_of_sm["position.weight"], (2, 1))  # of a longer context
    save_file(weights_of_sm | {"other": np.zeros(1, dtype=np.float32)}, tmp_path / "w.safetensors")
    assert setting_of(run, "--weights-file", "w.safetensors")[:2] == ["secret", None]


NOT_READABLE = "weights file 'w.safetensors' must be a readable safetensors file, but: "


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"embed.weight": None}, "must hold 'embed.weight' of shape (40, 16), but it is missing"),
        ({"embed.weight": np.zeros((40, 3))}, "'embed.weight' must have the shape (40, 16), but has (40, 3)"),
        ({"embed.weight": np.full((40, 16), np.nan)}, "must be finite, but 640 of its numbers are not"),
        (None, NOT_READABLE),
        (b"", NOT_READABLE),
        (b"not a safetensors file", NOT_READABLE),
    ],
)
def test_weights_that_do_not_fit_are_one_line(run, engine_stub, tmp_path, weights_of_sm, broken, message):
    if isinstance(broken, dict):
        weights = {name: value for name, value in (weights_of_sm | broken).items() if value is not None}
        save_file(weights, tmp_path / "w.safetensors")
    elif broken is not None:
        (tmp_path / "w.safetensors").write_bytes(broken)
    assert message in refused(run("compare", "SM", *TINY, "--weights-file", "w.safetensors"))


def test_a_lookup_finds_what_the_one_hot_tokens_select(graph_of):
    hot = graph_of("SM", seq_len=6, base="tiny", layers=1, vocab=40)
    first = replace(hot.nodes[0], op=replace(hot.nodes[0].op, encoding="lookup"))
    weights = compare.drawn_weights(hot, np.random.default_rng(0))
    tokens = np.array([0, 39, 7, 7, 1, 20])
    logits = interpreter.execute(replace(hot, nodes=(first, *hot.nodes[1:])), weights, tokens)
    np.testing.assert_array_equal(logits, interpreter.execute(hot, weights, tokens))
    with pytest.raises(UserError, match="`tokens` must be given for a graph that embeds them"):
        interpreter.values(hot, weights, None)
    with pytest.raises(UserError, match="`tokens` must be None for a graph without an embedding"):
        interpreter.encoded(OpGraph(nodes=()), tokens)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--protocol", "published"], "protocol published has no engine to compare with; choose one of semi2k, aby3, "),
        (["--protocol", "spdz"], "protocol must be one of semi2k, aby3, cheetah, crypten, but got 'spdz'."),
        ([], "it needs Python < 3.12 and numpy < 2; run: python3.11 -m pip install 'spu==0.9.5' 'numpy<2'"),
        (["--delays", "10ms,10ms,10ms"], "at least 3 different one-way delays"),
        (["--delays", "10ms,soon,20ms"], "--delays"),
        (["--ring-bits", "32", "--fraction-bits", "8"], "`ring_bits` must be at least 64 for division"),
    ],
)
def test_bad_input_is_one_line(run, no_engine, tmp_path, args, message):
    assert message in refused(run("compare", "SM", "--base", "tiny", *args))
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_a_wheel_is_named(run, no_engine, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    said = refused(run("compare", "SM", "--base", "tiny"))
    assert "has no wheel for this Python 3.13, where --protocol crypten runs" in said


@pytest.mark.parametrize("name", ["SM", "SM+LN+G", "HH(SM+ScFuFFN)", "SM(t)+ScFFN"])
@pytest.mark.parametrize("base", ["tiny", "pythia-70m"])
def test_drawn_weights_give_moderate_logits(name, base, graph_of):
    graph = graph_of(name, seq_len=16, base=base, layers=12, heads=4, d_model=64, vocab=300)
    generator = np.random.default_rng(0)
    weights, tokens = compare.drawn_weights(graph, generator), compare.drawn_tokens(graph, generator)
    logits = interpreter.execute(graph, weights, tokens)
    assert 0.3 < logits.std() < 3
    assert np.abs(logits).max() < 10
    again = compare.drawn_weights(graph, np.random.default_rng(0))
    assert all((again[key] == value).all() for key, value in weights.items())
