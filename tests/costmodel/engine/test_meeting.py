import json
import shutil
import socket
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from costmodel.engine import meeting
from costmodel.engine.channel import FAREWELL, Channel, Frame, GoneError, Peers
from costmodel.engine.children import Progress
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


def met(addresses, owns, wait_s=5.0):
    with ThreadPoolExecutor(len(owns)) as parties:
        return list(parties.map(meeting_of, range(len(owns)), [addresses] * len(owns), owns, [wait_s] * len(owns)))


@pytest.mark.parametrize("on_one_machine", [False, True])
def test_three_parties_meet(on_one_machine, free_peers, tmp_path):
    addresses = [str(tmp_path / str(rank)) for rank in range(3)] if on_one_machine else free_peers(3)
    assert met(addresses, [terms("aby3", EngineSetting())] * 3) == [[1, 2], [0, 2], [0, 1]]


def test_unequal_parties_are_told_so_on_both_sides(free_peers):
    own_terms = terms("semi2k", EngineSetting())
    versions = {f"version of {package}" for package in ("jax", "jaxlib", "numpy", "torch")}
    assert own_terms.keys() >= {"engine", "package", "cost model", "protocol", "sources", "ring"} | versions
    line = "the parties must have the same protocol, but party {} has {} and party {} {}; nothing was shared."
    assert met(free_peers(2), [own_terms, {**own_terms, "protocol": "cheetah"}], 1.0) == [  # the first may still come
        line.format(0, "semi2k", 1, "cheetah"),
        line.format(1, "cheetah", 0, "semi2k"),
    ]


def test_a_difference_in_any_source_that_computes_is_a_difference_in_terms(tmp_path, monkeypatch):
    package = shutil.copytree(Path(meeting.__file__).parents[1], tmp_path / "costmodel")
    digests = [sources_digest()]
    monkeypatch.setattr(meeting, "__file__", str(package / "engine/meeting.py"))
    for edited in (None, "execution/op_functions.py", "engine/crypten_arrays.py", "ops/layers.py", "protocols/ckks.py"):
        if edited is not None:
            (package / edited).write_text((package / edited).read_text() + "# other\n")
        digests.append(sources_digest())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


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


def connected(address):
    for _ in range(100):
        with suppress(ConnectionRefusedError):
            return socket.create_connection(address)
        time.sleep(0.05)
    raise AssertionError(f"nobody listens at {address}")


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
        with connected(addresses[0]) as stranger:
            stranger.sendall(said)
        assert meeting_of(1, addresses, own_terms) == [0]
        assert client.result() == [1]


@contextmanager
def annoyed(address):
    """Within the block, six connections say nothing, one sends a byte of a hello now and then, and others flood."""
    over, hello = Event(), frame(**HELLO_OF_1, sizes=[])
    silent = [connected(address) for _ in range(7)]

    def drip():
        for byte in hello:
            if over.wait(0.2):
                return
            with suppress(OSError):
                silent[0].send(bytes([byte]))

    def flood():
        while not over.wait(0.001):
            with suppress(OSError):
                flooding.append(socket.create_connection(address, timeout=1))

    flooding: list[socket.socket] = []
    threads = [Thread(target=drip), Thread(target=flood)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()
    for connection in (*silent, *flooding):
        connection.close()


def test_strangers_do_not_hold_up_parties(free_peers):
    addresses, own_terms = free_peers(2), terms("semi2k", EngineSetting())
    with ThreadPoolExecutor(1) as parties:
        client = parties.submit(meeting_of, 0, addresses, own_terms, 60.0)
        with annoyed(addresses[0]):
            begun = time.monotonic()
            assert meeting_of(1, addresses, own_terms, 60.0) == [0]
            assert client.result() == [1]
            assert time.monotonic() - begun < 10


def test_strangers_do_not_hold_a_meeting_beyond_its_wait(free_peers):
    addresses, own_terms, begun = free_peers(2), terms("semi2k", EngineSetting()), time.monotonic()
    with ThreadPoolExecutor(1) as parties:
        client = parties.submit(meeting_of, 0, addresses, own_terms, 1.5)
        with annoyed(addresses[0]):
            assert "must come within 1.5 s, but did not (it did not call)" in client.result()
            assert time.monotonic() - begun < 10


def test_who_drips_where_a_party_should_be_is_not_waited_for_longer(free_peers):
    addresses, own_terms, over = free_peers(2), terms("semi2k", EngineSetting()), Event()
    with socket.create_server(addresses[0]) as server:

        def drip():
            connection, _ = server.accept()
            with connection, suppress(OSError):
                while not over.wait(0.1):
                    connection.send(b"\x00")

        Thread(target=drip, daemon=True).start()
        begun = time.monotonic()
        assert "must come within 0.8 s, but did not" in meeting_of(1, addresses, own_terms, 0.8)
        assert time.monotonic() - begun < 5
        over.set()


@pytest.mark.parametrize("comes", [True, False])
def test_a_stranger_with_other_terms_is_told_and_dropped(comes, free_peers):
    """It is the reason if the party itself does not come."""
    addresses, own_terms = free_peers(2), terms("semi2k", EngineSetting())
    with ThreadPoolExecutor(1) as parties:
        client = parties.submit(meeting_of, 0, addresses, own_terms, 60.0 if comes else 1.0)
        stranger = Channel(connected(addresses[0]))
        stranger.send(HELLO_OF_1 | {"terms": {**own_terms, "ring": "\x1b[2J9 bits"}})
        assert stranger.receive().header == {"kind": HELLO, "rank": 0, "terms": own_terms}
        with pytest.raises(GoneError):
            stranger.receive()
        stranger.close()
        assert not client.done()
        if comes:
            assert meeting_of(1, addresses, own_terms, 60.0) == [0]
            assert client.result() == [1]
        else:
            ring, other = own_terms["ring"], r"\x1b[2J9 bits"
            line = (
                f"the parties must have the same ring, but party 0 has {ring} and party 1 {other}; nothing was shared."
            )
            assert client.result() == line


@pytest.fixture
def pair():
    ends = [Channel(end) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ([10**13], "sent a frame of 1e+13 bytes, of which no op here needs more than 1.00 MB"),
        ([1, 10**6], "sent a frame of 1e+06 bytes, of which no op here needs more than 1.00 MB"),
        ([10**30], "sent a frame of 1e+30 bytes, of which no op here needs more than 1.00 MB"),
        *(([size], "sent what is no frame") for size in (-1, True, None, "1", [1], 0.5)),
        (7, "sent what is no frame"),
    ],
)
def test_absurd_sizes_end_a_session_in_a_line(sizes, line):
    ours, theirs = socket.socketpair()
    lost: SimpleQueue[tuple[int, str]] = SimpleQueue()
    with theirs:
        peers = Peers({1: Channel(ours, 10**6)}, lambda rank, why: lost.put((rank, str(why))))
        theirs.sendall(frame(kind="share", sizes=sizes))
        assert lost.get(timeout=5) == (1, line)
        peers.close()


def test_memory_for_a_blob_follows_its_bytes(pair):
    sender, receiver = pair
    tracemalloc.start()
    peers = Peers({1: receiver}, lambda rank, why: None)
    sender._connection.sendall(frame(kind="share", sizes=[10**9]) + bytes(1000))
    time.sleep(0.3)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()
    sender.close()
    peers.close()


def test_whatever_ends_a_reader_is_told(pair, monkeypatch):
    def fail(*args, **settings):
        raise MemoryError("no room")

    monkeypatch.setattr(pair[0], "receive", fail)
    lost: SimpleQueue[Any] = SimpleQueue()
    Peers({1: pair[0]}, lambda *of_peer: lost.put(of_peer)).close()
    rank, why = lost.get(timeout=5)
    assert (rank, repr(why)) == (1, "MemoryError('no room')")


def test_a_silent_peer_is_lost_and_one_that_has_nothing_to_say_is_not(pair, monkeypatch):
    monkeypatch.setattr("costmodel.engine.channel.BEAT_S", 0.1)
    lost: SimpleQueue[Any] = SimpleQueue()
    asleep, other_ends = Event(), [Channel(end) for end in socket.socketpair()]
    awake = [Peers({end: pair[1 - end]}, lambda *of_peer: lost.put(of_peer), 0.5) for end in (1, 0)]
    stopped = [
        Peers({2: other_ends[0]}, lambda *of_peer: lost.put(of_peer), 0.5),
        Peers({0: other_ends[1]}, lambda *of_peer: lost.put(of_peer), is_awake=lambda: not asleep.is_set()),
    ]
    with pytest.raises(Empty):
        lost.get(timeout=1.0)
    asleep.set()
    rank, why = lost.get(timeout=20)
    assert (rank, str(why)) == (2, "has been silent for 0.5 s")
    for peers in (*awake, *stopped):
        peers._is_over.set()
    for channel in (*pair, *other_ends):
        channel.send({"kind": FAREWELL})
    for peers in (*awake, *stopped):
        peers.close()


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
    peers = Peers({1: accepted[0], 2: accepted[1]}, lambda rank, _: lost.put(rank))
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
        peers = Peers({1 - rank: channels[rank]}, lambda peer, why: ended.put(-1))
        runtime: Any = SimpleNamespace(stop=stop)
        assignment: Any = None
        Party(
            assignment=assignment, steps=(), spent=[], peers=peers, runtime=runtime, progress=Progress(file=-1)
        ).part()
        ended.put(rank)

    for rank, stop in enumerate([lambda: None, slow.wait]):
        Thread(target=part, args=(rank, stop), daemon=True).start()
    with pytest.raises(Empty):
        ended.get(timeout=0.3)
    slow.set()
    assert {ended.get(timeout=5), ended.get(timeout=5)} == {0, 1}
