import json
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from costmodel.engine import meeting
from costmodel.engine.channel import FAREWELL, Channel, Frame, GoneError, Peers
from costmodel.engine.meeting import HELLO, meet, parse_peers, sources_digest, terms
from costmodel.engine.party import Party
from costmodel.errors import UserError
from costmodel.protocols.primitives import EngineSetting


def test_a_frame_arrives_as_it_was_sent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = Channel(socket.create_connection(server.getsockname()))
        receiver = Channel(server.accept()[0])
    blobs = (b"", bytes(range(256)) * 1000)
    sender.send({"kind": "share", "name": "embed"}, blobs)
    sender.send({"kind": "shared"})
    assert receiver.receive() == Frame({"kind": "share", "name": "embed"}, blobs)
    assert receiver.receive() == Frame({"kind": "shared"})
    assert sender.sent_bytes > 256_000
    sender.close()
    with pytest.raises(GoneError):
        receiver.receive()
    receiver.close()


def meeting_of(rank, addresses, own_terms, wait_s=5.0):
    """What a party says of a meeting: the ranks it met, or the error."""
    try:
        channels = meet(rank, addresses, own_terms, wait_s)
    except UserError as error:
        return str(error)
    for channel in channels.values():
        channel.close()
    return sorted(channels)


def met(addresses, owns):
    with ThreadPoolExecutor(len(owns)) as parties:
        return list(parties.map(meeting_of, range(len(owns)), [addresses] * len(owns), owns))


@pytest.mark.parametrize("on_one_machine", [False, True])
def test_three_parties_meet(on_one_machine, free_peers, tmp_path):
    addresses = [str(tmp_path / str(rank)) for rank in range(3)] if on_one_machine else free_peers(3)
    assert met(addresses, [terms("aby3", EngineSetting())] * 3) == [[1, 2], [0, 2], [0, 1]]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("engine", "0.9.4"),
        ("package", "0.0.9"),
        ("cost model", "1"),
        ("protocol", "cheetah"),
        ("sources", "0123456789ab"),
        ("ring", "64 bits, 17 of them fraction"),
        *((f"version of {name}", "1.0") for name in ("jax", "jaxlib", "numpy", "torch")),
    ],
)
def test_unequal_parties_are_told_so_on_both_sides(name, other, free_peers):
    own_terms = terms("semi2k", EngineSetting())
    line = f"the parties must have the same {name}, but party {{}} has {{}} and party {{}} {{}}; nothing was shared."
    assert met(free_peers(2), [own_terms, {**own_terms, name: other}]) == [
        line.format(0, own_terms[name], 1, other),
        line.format(1, other, 0, own_terms[name]),
    ]


def test_a_difference_in_any_source_that_computes_is_a_difference_in_terms(tmp_path):
    package = shutil.copytree(Path(meeting.__file__).parents[1], tmp_path / "costmodel")
    script = "from costmodel.engine.meeting import sources_digest; print(sources_digest())"
    digests = [sources_digest()]
    for edited in (None, "execution/op_functions.py", "engine/crypten_functions.py", "ops/layers.py", "rotary.py"):
        if edited is not None:
            (package / edited).write_text((package / edited).read_text() + "# other\n")
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env={}, capture_output=True, text=True)
        digests.append(done.stdout.strip())
    assert digests[0] == digests[1]
    assert len({*digests[1:], ""}) == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_party_that_does_not_come_is_named(rank, free_peers):
    addresses, begun = free_peers(2), time.monotonic()
    host, port = addresses[1 - rank]
    with pytest.raises(UserError, match=rf"party {1 - rank} \({host}:{port}\) must come within 0.5 s, but did not"):
        meet(rank, addresses, terms("semi2k", EngineSetting()), 0.5)
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_named(offset, free_peers):
    addresses = free_peers(2)
    host, port = addresses[0]
    with (
        socket.create_server((host, port + offset)),
        pytest.raises(UserError, match=rf"cannot listen at {host}:{port + offset}: Address already in use"),
    ):
        meet(0, addresses, terms("semi2k", EngineSetting()), 0.5)


def frame(**header):
    head = json.dumps(header).encode()
    return len(head).to_bytes(4, "big") + head


HELLO_OF_1 = {"kind": HELLO, "rank": 1, "terms": {}}


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x01\x00\x00" + b"[" * (1 << 16),
        frame(**HELLO_OF_1 | {"rank": [1]}, sizes=[]),
        frame(**HELLO_OF_1 | {"rank": True}, sizes=[]),
        frame(**HELLO_OF_1, sizes=[10**30]),
        frame(**HELLO_OF_1, sizes=[10**13]),
        frame(**HELLO_OF_1, sizes=[10**13, -(10**13)]),
    ],
)
def test_who_says_something_else_is_not_a_party(said, free_peers):
    addresses, own_terms = free_peers(2), terms("semi2k", EngineSetting())
    with ThreadPoolExecutor(1) as parties:
        client = parties.submit(meeting_of, 0, addresses, own_terms)
        for _ in range(50):
            try:
                with socket.create_connection(addresses[0]) as stranger:
                    stranger.sendall(said)
                    break
            except ConnectionRefusedError:
                time.sleep(0.05)
        assert meeting_of(1, addresses, own_terms) == [0]
        assert client.result() == [1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("localhost:7000", "but got 1"),
        ("a:1,b:2,c:3", "but got 3"),
        ("a:1,b", "but got 'b'"),
        ("a:1,b:65535", "but got 'b:65535'"),
        ("a:70,a:71", "must leave every party its port and the one after it"),
    ],
)
def test_peers_are_hosts_and_ports(text, line):
    with pytest.raises(UserError, match=line):
        parse_peers(text, 2)


def test_peers_by_rank():
    assert parse_peers("10.0.0.1:7000, server.org:7000", 2) == (("10.0.0.1", 7000), ("server.org", 7000))


def test_a_peer_that_leaves_without_farewell_is_noticed_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [Channel(socket.create_connection(server.getsockname())) for _ in range(2)]
        accepted = [Channel(server.accept()[0]) for _ in range(2)]
    lost: SimpleQueue[int] = SimpleQueue()
    peers = Peers({1: accepted[0], 2: accepted[1]}, lost.put)
    ends[0].send({"kind": FAREWELL})
    ends[0].close()
    assert peers.receive(1).header == {"kind": FAREWELL}
    time.sleep(0.2)
    assert lost.empty()
    ends[1].close()
    assert lost.get(timeout=5) == 2
    for channel in accepted:
        channel.close()


def test_no_party_ends_before_the_links_of_all_have_stopped():
    channels, slow = [Channel(end) for end in socket.socketpair()], Event()
    ended: SimpleQueue[int] = SimpleQueue()

    def part(rank, stop):
        peers = Peers({1 - rank: channels[rank]}, lambda peer: ended.put(-1))
        runtime: Any = SimpleNamespace(stop=stop)
        assignment: Any = None
        Party(assignment=assignment, steps=(), spent=(), peers=peers, runtime=runtime).part()
        ended.put(rank)

    for rank, stop in enumerate([lambda: None, slow.wait]):
        Thread(target=part, args=(rank, stop), daemon=True).start()
    with pytest.raises(Empty):
        ended.get(timeout=0.3)
    slow.set()
    assert {ended.get(timeout=5), ended.get(timeout=5)} == {0, 1}
