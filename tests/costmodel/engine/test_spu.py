"""The engine runs the same graph as the clear run, and its costs are the sum of its ops'."""

import numpy as np
import pytest

from costmodel import ops
from costmodel.engine import spu
from costmodel.engine.job import ops_job
from costmodel.engine.links import UNHINDERED, memory
from costmodel.engine.profile import entries
from costmodel.execution import interpreter
from costmodel.ops import Op, OpGraph
from costmodel.protocols import aby3, cheetah, semi2k
from costmodel.protocols.primitives import EngineSetting
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

PROTOCOLS = {"semi2k": semi2k.comm, "aby3": aby3.comm}
LOGIT_TOLERANCE = 0.02
CHEETAH_TOLERANCE = 1e-3  # compressed ciphertexts vary in size
DECODERS = ("SM+LN+G", "1xLTLKs-1xoSoFs", "HH(SM+ScFuFFN)")


def graph_of(name: str, seq_len: int) -> OpGraph:
    base = base_architecture("tiny", Dimensions(vocab=100, heads=4, d_model=32))
    return lower(parse(name, base).architecture, seq_len)


def drawn_weights(graph: OpGraph, seed: int = 0) -> dict[str, np.ndarray]:
    """Numbers of the size that training starts from: N(0, 0.1) tables and linears, scales and gains about 1."""
    generator = np.random.default_rng(seed)
    matrices = (ops.TokenEmbedding, ops.PositionEmbedding, ops.Linear, ops.VocabProjection, ops.LeakyRelu)
    return {
        f"{node.name}.{suffix}": generator.normal(0.0 if isinstance(node.op, matrices) else 1.0, 0.1, shape)
        for node in graph
        for suffix, shape in node.op.weight_shapes.items()
    }


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("protocol", "name"),
    [*((protocol, name) for protocol in PROTOCOLS for name in DECODERS), ("cheetah", DECODERS[0])],
)
def test_logits_under_the_engine_are_the_clear_ones(protocol: str, name: str) -> None:
    graph = graph_of(name, seq_len=12)
    weights, tokens = drawn_weights(graph), np.random.default_rng(1).integers(100, size=12)
    clear = interpreter.execute(graph, weights, tokens)
    run = spu.run(graph, weights, tokens, protocol=protocol, setting=EngineSetting())
    assert np.abs(run.logits - clear).max() < LOGIT_TOLERANCE
    assert np.mean(run.logits.argmax(axis=1) == clear.argmax(axis=1)) >= 0.99
    assert [node for node, _ in run.by_op] == list(graph)
    if protocol in PROTOCOLS:
        predicted = [PROTOCOLS[protocol](node.op, EngineSetting()) for node in graph]
        assert [cost.sent_bytes for _, cost in run.by_op] == [comm.online_bytes for comm in predicted]
        assert [cost.messages for _, cost in run.by_op] == [comm.messages for comm in predicted]
    else:
        total = sum(
            comm.online_bytes + comm.setup_bytes for comm in cheetah.walk([node.op for node in graph], EngineSetting())
        )
        assert abs(total / sum(cost.sent_bytes for _, cost in run.by_op) - 1) < CHEETAH_TOLERANCE


@pytest.mark.needs_engine
def test_a_failure_names_its_op() -> None:
    narrow = EngineSetting(ring_bits=32, fraction_bits=8)  # in which the engine cannot divide
    with pytest.raises(spu.EngineError, match=r"failed \(status 1\) in op '1.Softmax'"):
        spu.measure(
            [ops.Relu(rows=2, features=2), ops.Softmax(heads=1, queries=2, keys=2)], protocol="semi2k", setting=narrow
        )


@pytest.mark.needs_engine
def test_a_run_that_takes_too_long_is_stopped() -> None:
    job = ops_job([ops.Relu(rows=2, features=2)], protocol="semi2k", setting=EngineSetting())
    with pytest.raises(spu.EngineError, match="did not finish op"):
        spu.passes(job, memory, [UNHINDERED], timeout_s=0.01)


def test_without_the_engine_the_command_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spu, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="is not installed.*run: .*pip install 'spu==0.9.5'"):
        spu.measure([ops.Relu(rows=1, features=1)], protocol="semi2k", setting=EngineSetting())


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of semi2k, aby3, cheetah, but got 'spdz'"):
        spu.measure([ops.Relu(rows=1, features=1)], protocol="spdz", setting=EngineSetting())


def test_costs_are_read_from_the_engines_logs() -> None:
    log = """
[info] [Profiling] SPU execution embed completed, input processing took 1e-06s, total time 0.5s.
[info] - pphlo.dot, executed 1 times, duration 0.1s, send bytes 99 recv bytes 99, send actions 9, recv actions 9
[info] Link details: total send bytes 12, recv bytes 10, send actions 2, recv actions 1
[info] [Profiling] SPU execution embed completed, input processing took 1e-06s, total time 2.5e-01s.
[info] Link details: total send bytes 10, recv bytes 12, send actions 1, recv actions 2
[info] [Profiling] SPU execution logits completed, input processing took 1e-06s, total time 0.1s.
[info] Link details: total send bytes 5, recv bytes 5, send actions 1, recv actions 1
"""
    found = entries(log)
    assert found == {"embed": [(12, 2), (10, 1)], "logits": [(5, 1)]}
    # the two lines of embed: both parties of one pass in one log, or a party in two passes, beside another's log
    assert spu._traffic([found], ["embed"], 1) == [[(22, 3)]]
    assert spu._traffic([found, {"embed": [(1, 1), (2, 2)]}], ["embed"], 2) == [[(13, 3)], [(12, 3)]]


def test_an_op_takes_from_the_first_start_or_the_end_of_the_op_before_to_the_last_end() -> None:
    times = [[(1.0, 2.0), (1.5, 3.0)], [(2.0, 3.5), (3.0, 4.0)], [(4.5, 5.0), (4.5, 5.0)]]
    done = spu._pass([(8, 1), (0, 0), (6, 2)], times)
    assert done.seconds == 4.0
    assert [cost.seconds for cost in done.by_op] == [2.0, 1.0, 0.5]
    assert [(cost.sent_bytes, cost.messages) for cost in done.by_op] == [(8, 1), (0, 0), (6, 2)]


@pytest.mark.needs_engine
@pytest.mark.parametrize("protocol", ["semi2k", "aby3"])
def test_over_tcp_the_same_is_sent_and_computed(protocol: str) -> None:
    graph = graph_of("SM+ScFuFFN", seq_len=4)
    weights, tokens = drawn_weights(graph), np.arange(4)
    clear = interpreter.execute(graph, weights, tokens)
    run = spu.run(graph, weights, tokens, protocol=protocol, setting=EngineSetting(), link="tcp")
    assert np.abs(run.logits - clear).max() < LOGIT_TOLERANCE
    predicted = [PROTOCOLS[protocol](node.op, EngineSetting()) for node in graph]
    assert [cost.sent_bytes for _, cost in run.by_op] == [comm.online_bytes for comm in predicted]
    assert [cost.messages for _, cost in run.by_op] == [comm.messages for comm in predicted]


def test_an_unknown_link_is_refused() -> None:
    with pytest.raises(ValueError, match="`link` must be one of memory, tcp, but got 'pigeon'"):
        spu.measure([ops.Relu(rows=1, features=1)], protocol="semi2k", setting=EngineSetting(), link="pigeon")


@pytest.mark.needs_engine
def test_a_failure_at_one_party_names_op_and_rank() -> None:
    narrow = EngineSetting(ring_bits=32, fraction_bits=8)
    ops_: list[Op] = [ops.Relu(rows=2, features=2), ops.Softmax(heads=1, queries=2, keys=2)]
    with pytest.raises(spu.EngineError, match=r"failed \(status 1\) in op '1.Softmax' at rank [01]: "):
        spu.measure(ops_, protocol="semi2k", setting=narrow, link="tcp")
