import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from threading import Thread

import numpy as np
import pytest

from costmodel import ops
from costmodel.deployment.known_layers import halves
from costmodel.engine import children, links, spu
from costmodel.engine.children import kept_children, own_children
from costmodel.engine.greedy import ClearRun, ClientLayers, generate, run_step
from costmodel.engine.links import LOOPBACK, UNHINDERED
from costmodel.engine.plan import SERVER, Plan, graphs, part_of, predictions
from costmodel.engine.session import on_this_machine, started
from costmodel.engine.spu_runtime import make_shares
from costmodel.errors import StoppedError, UserError
from costmodel.execution import interpreter
from costmodel.pricing.price import price
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
from tests.costmodel.conftest import CHEETAH_TOLERANCE

PROMPT = [3, 14, 15, 9, 26]
SLOW_S = 2.0  # a comparison takes eight times as long
STOPPED = {"semi2k": "spu", "crypten": "crypten"}  # by protocol, the package of its engine


def relu(protocol="semi2k") -> spu.Job:
    setting = ENGINE_PROTOCOLS[protocol].setting()
    return spu.ops_job([ops.Relu(rows=2, features=2)], protocol=protocol, setting=setting)


def answered(client, weights, ends=(), layers=None):
    """Every run and its agreement, with its prediction."""
    steps = graphs(client.graph_of, client.plan)
    expected = predictions(steps, client.protocol, client.setting, "loopback")
    with on_this_machine(client) as session:
        assert session.num_steps == len(steps)
        tokens = list(generate(session, steps, PROMPT, ClearRun(weights), ends, layers))
        session.leave()
    return list(zip(tokens, expected, strict=False))


def in_the_clear(asked, weights):
    """The tokens, one after the other, of the same model in plaintext."""
    clear, tokens, alone = ClearRun(weights), np.array(PROMPT), []
    for graph in graphs(asked.graph_of, asked.plan):
        alone.append(int(clear.output(graph, tokens)[-1].argmax()))
        tokens = np.array(alone[-1:])
    return alone


SPU, CRYPTEN = pytest.mark.needs_engine, pytest.mark.needs_crypten


@pytest.mark.parametrize(
    ("protocol", "setting"),
    [
        pytest.param("semi2k", {}, marks=SPU),
        pytest.param("semi2k", {"weight_masks": "kept"}, marks=SPU),
        pytest.param("aby3", {}, marks=SPU),
        pytest.param("aby3", {"weights": "server"}, marks=SPU),
        pytest.param("cheetah", {}, marks=[SPU, pytest.mark.slow]),
        pytest.param("crypten", {}, marks=CRYPTEN),
        pytest.param("crypten", {"device": "emulated"}, marks=CRYPTEN),
    ],
)
def test_tokens_cost_what_is_predicted_and_are_those_in_the_clear(client, weights, protocol, setting):
    num_new = 2 if protocol in ("aby3", "cheetah") else 3  # a second each; under cheetah more, the first with keys
    asked = client(protocol, num_new=num_new, **setting)
    answer = answered(asked, weights)
    assert len(answer) == num_new
    for (token, agreement), expected in answer:
        assert agreement.num_equal == 1
        assert agreement.largest_error < (0.02 if protocol == "crypten" else 0.01)
        assert token.messages == expected.messages
        assert (expected.seconds is None) == ("device" in setting)
        if protocol == "cheetah":
            assert token.sent_bytes == pytest.approx(expected.sent_bytes, rel=CHEETAH_TOLERANCE)
        else:
            assert token.sent_bytes == expected.sent_bytes
        if protocol == "crypten":
            of_client, of_server, of_dealer = token.by_party
            assert [cost.sent_bytes for cost in of_client] == [cost.sent_bytes for cost in of_server]
            assert [cost.messages for cost in of_dealer] == [int(cost.messages > 0) for cost in of_server]
    if protocol != "cheetah":  # an estimate has shares of batches that a session makes whole
        (architecture,) = asked.graph_of.args
        of_price = {name: value for name, value in setting.items() if name != "device"}
        whole = {"seq_len": 5, "projection": "last", "rows": "needed", **of_price}
        priced = price(architecture, protocol=protocol, new_tokens=num_new, **whole)
        assert [cost.sent_bytes for cost in priced.tokens.by_token] == [token.sent_bytes for (token, _), _ in answer]
        assert [cost.messages for cost in priced.tokens.by_token] == [token.messages for (token, _), _ in answer]
    assert [token.token for (token, _), _ in answer] == in_the_clear(asked, weights)


@pytest.mark.needs_engine
def test_a_client_that_computes_its_layers_gets_the_same_tokens(client, weights):
    asked = client("semi2k")
    split = replace(asked, graph_of=partial(own_layers, asked.graph_of))
    client_graphs = [halves(graph, 1).client for graph in graphs(asked.graph_of, asked.plan)]
    answer = answered(split, weights, layers=ClientLayers(graphs=tuple(client_graphs), run=ClearRun(weights)))
    assert [token.token for (token, _), _ in answer] == in_the_clear(asked, weights)
    for (token, agreement), expected in answer:
        assert (token.sent_bytes, token.messages) == (expected.sent_bytes, expected.messages)
        assert agreement.largest_error < 0.01


def own_layers(graph_of, num_tokens, deployment):
    return graph_of(num_tokens, replace(deployment, client_layers=1))


@pytest.mark.needs_engine
@pytest.mark.parametrize("protocol", ["semi2k", "aby3", "cheetah"])
def test_of_weights_that_the_server_holds_others_have_zeros(protocol):
    value, setting = np.full((4, 8), 0.7), EngineSetting(weights="server")
    linear = ops.Linear(rows=1, in_features=8, out_features=4, bias=False)
    shares = [share.share_chunks[0] for share in make_shares(protocol, setting, value, linear)]
    for rank, share in enumerate(shares):
        assert any(share[-4 * 8 * 8 :]) == (rank == SERVER)
    both = [share.share_chunks[0] for share in make_shares(protocol, EngineSetting(), value, linear)]
    assert all(any(share[-4 * 8 * 8 :]) for share in both)


@pytest.mark.needs_engine
def test_the_end_of_a_document_ends_the_answer(client, weights):
    asked = client("semi2k")
    first = in_the_clear(asked, weights)[0]
    assert [token.token for (token, _), _ in answered(asked, weights, ends=(first,))] == [first]


@pytest.mark.needs_engine
def test_sequences_give_the_logits_of_every_token(client, weights):
    asked = replace(client("semi2k"), plan=Plan(kind="sequences", num_tokens=5))
    (graph,) = graphs(asked.graph_of, asked.plan)
    drawn = np.random.default_rng(1).integers(50, size=(2, 5))
    with on_this_machine(asked) as session:
        done = [run_step(session, 0, graph, row, ClearRun(weights), None) for row in drawn]
        session.leave()
    for run, clear in done:
        assert run.logits.shape == (5, 50)
        assert np.abs(run.logits - clear).max() < 0.01
    expected = predictions([graph] * 2, "semi2k", asked.setting, "loopback")
    assert [run.sent_bytes for run, _ in done] == [prediction.sent_bytes for prediction in expected]


@pytest.mark.needs_engine
def test_a_kept_process_has_a_fresh_runtime_for_every_job():
    """The first run of cheetah makes keys and oblivious transfers: twice the same bytes, by the same processes."""
    job = relu("cheetah")
    with own_children(), kept_children():
        runs = []
        for _ in range(2):
            with kept_children(), on_this_machine(job.client) as session:
                runs.append((session.run(0, job.inputs), [child.process for child in session.children.values()]))
                session.leave()
        (first, processes), (second, again) = runs
        assert set(processes) == set(again)
        assert first.messages == second.messages > 1000
        assert first.sent_bytes == pytest.approx(second.sent_bytes, rel=CHEETAH_TOLERANCE)
        with own_children(), children.child_of(1) as own:
            pass
    assert all(process.poll() is not None for process in (*processes, own.process))


@pytest.mark.needs_engine
@pytest.mark.parametrize("masks", ["fresh", "kept"])
def test_weights_and_prompts_are_never_on_the_disk(client, decoder, masks):
    """Only masks are there, and the sockets on which the parties met; all are gone with the session."""
    asked, tokens = client("semi2k", weight_masks=masks), interpreter.encoded(decoder(5), np.array(PROMPT))
    with on_this_machine(asked) as session:
        folders = [child.folder for child in session.children.values()]
        session.run(0, {"tokens": tokens})
        files = [path.relative_to(folder) for folder in folders for path in folder.rglob("*")]
        session.leave()
    names = {str(path.parts[1] if len(path.parts) > 1 else path).partition(".")[0] for path in files}
    assert names == {"job", "socket"} | ({"BeaverCache"} if masks == "kept" else set())
    assert not any((folder / "job").exists() for folder in folders)


def until(holds, patience_s=30.0):
    end = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.needs_engine
def test_a_folder_too_deep_for_a_socket_is_named(monkeypatch, tmp_path):
    (deep := tmp_path / ("a" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with (
        pytest.raises(UserError, match="TMPDIR must lead to paths of at most 100 bytes"),
        own_children(),
        on_this_machine(relu().client),
    ):
        pass


# Below, parties end that other tests could use again, and with them the programs that they have compiled.
@pytest.mark.needs_engine
def test_a_party_that_is_lost_elsewhere_is_named(client, decoder, free_peers):
    """The server runs in a session of its own, as on another machine."""
    asked = replace(client("semi2k"), addresses=free_peers(2))
    with started([part_of(asked, 1)]) as elsewhere, started([part_of(asked, 0)]) as here:
        here.await_ready()
        elsewhere.await_ready()
        elsewhere.children[1].process.kill()
        with pytest.raises(StoppedError, match=r"^party 1 \(the server, 127.0.0.1:\d+\) is gone; start all parties"):
            here.run(0, {"tokens": interpreter.encoded(decoder(5), np.array(PROMPT))})


LARGE = ops.Silu(rows=1, features=250_000)


@pytest.mark.parametrize(
    ("protocol", "op", "killed"),
    [
        pytest.param("semi2k", ops.Relu(rows=2, features=2), 0, marks=SPU),
        pytest.param("aby3", ops.Relu(rows=2, features=2), 2, marks=SPU),
        pytest.param("crypten", LARGE, 0, marks=[CRYPTEN, pytest.mark.slow]),
        pytest.param("crypten", LARGE, 1, marks=CRYPTEN),
        pytest.param("crypten", LARGE, 2, marks=CRYPTEN),  # the dealer
    ],
)
def test_killing_a_party_in_mid_op_ends_the_others(protocol, op, killed):
    job = spu.ops_job([op], protocol=protocol, setting=ENGINE_PROTOCOLS[protocol].setting())
    with on_this_machine(job.client, links.tcp if protocol == "crypten" else links.delayed) as session:
        processes = [child.process for child in session.children.values()]
        if protocol != "crypten":
            session.set_delay(SLOW_S)
        Thread(target=kill_in_op, args=(session.children[killed],)).start()
        ended = rf"^party {killed} has ended \(status -9\) in op '0.{type(op).__name__}': killed, "
        with pytest.raises(StoppedError, match=ended):
            session.run(0, job.inputs)
        begun = time.monotonic()
        for process in processes:
            assert process.wait(10) != 0
        assert time.monotonic() - begun < 10
    if protocol != "crypten":
        assert spu.passes(relu(), links.tcp, [UNHINDERED])[0].by_op[0].messages == 16  # by others


def kill_in_op(child):
    until(lambda: child.progress.at)
    child.process.kill()


@pytest.mark.needs_engine
def test_a_stopped_party_ends_the_session():
    """The engine itself waits for ten minutes, and CrypTen for ever; both are stopped here, where both are there."""
    with ExitStack() as stack:
        stopped = []
        for job in (relu(protocol) for protocol, package in STOPPED.items() if find_spec(package)):
            session = stack.enter_context(on_this_machine(replace(job.client, idle_s=4.0)))
            session.children[1].process.send_signal(signal.SIGSTOP)
            stopped.append((session, job.inputs))
        for session, inputs in stopped:
            with pytest.raises(
                StoppedError, match=r"^party 1 \(the server\) has been silent for 4 s; start all parties"
            ):
                session.run(0, inputs)


@pytest.mark.needs_engine
def test_a_port_that_is_taken_is_tried_again_elsewhere():
    tried = []
    with socket.create_server((LOOPBACK, 0)) as taken:

        @contextmanager
        def link(num_parties):
            with links.tcp(num_parties) as wiring:
                tried.append(wiring)
                address, _ = wiring.addresses[0]
                crowded = ((address, f"{LOOPBACK}:{taken.getsockname()[1]}"),) * 2
                yield wiring if len(tried) > 1 else replace(wiring, addresses=crowded)

        (only,) = spu.passes(relu(), link, [UNHINDERED])
    assert only.by_op[0].messages == 16
    assert len(tried) == 2


@pytest.mark.needs_engine
def test_parties_of_other_models_do_not_share_anything(client, free_peers):
    asked = replace(client("semi2k"), addresses=free_peers(2))
    other = replace(asked, graph_of=OtherGraph(asked.graph_of))
    mixed = [part_of(asked, 0), part_of(other, 1)]
    with started(mixed) as session, pytest.raises(UserError, match="must have the same op graph.*nothing was shared"):
        session.await_ready()


class OtherGraph:
    """The same model, without its deployment."""

    def __init__(self, graph_of):
        self.graph_of = graph_of

    def __call__(self, seq_len, deployment):
        return self.graph_of(seq_len)


def test_what_a_user_states_for_glibc_comes_last(monkeypatch):
    """Where tunables are there twice, glibc takes the last."""
    monkeypatch.delenv(children.TUNABLES, raising=False)
    tunables = children.environment(1)[children.TUNABLES]
    assert tunables.split(":") == list(children.KEPT_MEMORY)
    monkeypatch.setenv(children.TUNABLES, "glibc.malloc.hugetlb=0")
    assert children.environment(1)[children.TUNABLES] == f"{tunables}:glibc.malloc.hugetlb=0"


def test_what_cannot_be_started_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/absent")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError), children.child_of(1):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.needs_engine
def test_parties_end_with_their_parent_and_delete_their_folder(tmp_path):
    """Even with one that is killed: its end of the socket that is their stdin closes."""
    (folder := tmp_path / "party" / "job").mkdir(parents=True)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "costmodel.engine.party", str(folder.parent), "2"]
    process = subprocess.Popen(command, stdin=theirs.fileno())
    theirs.close()
    ours.close()
    assert process.wait(timeout=60) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.needs_engine
def test_a_party_without_the_folder_of_its_job_deletes_its_own():
    """As where another thread, which saw the parent end, has already deleted the first, and is at the second."""
    with own_children(), children.child_of(1) as child:
        child.tell("begin", relu().client, None)
        assert "FileNotFoundError" in child.channel.receive().header["error"]
        assert child.process.wait(60) == 1
        assert not child.folder.exists()


def test_the_last_words_of_a_killed_engine_are_not_its_profile():
    profile = "[info] [api.cc:233] Link details: total send bytes 0, recv bytes 0, send actions 0, recv actions 0\n"
    assert children.last_words(profile) == "no output"
    assert children.last_words("what(): out of memory\n" + profile) == "what(): out of memory"


def test_a_delay_that_a_link_does_not_have_is_refused():
    with links.tcp(2) as wiring, pytest.raises(UserError, match="this link does not delay messages"):
        wiring.set_delay(SLOW_S)
