import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest

from costmodel.engine.channel import GoneError
from costmodel.engine.keys import KEY, Keys
from costmodel.engine.links import LOOPBACK, Relay, tunnelled
from costmodel.engine.meeting import meet
from costmodel.engine.plan import part_of
from costmodel.engine.session import started
from costmodel.errors import UserError
from costmodel.execution import interpreter

TERMS = {"secret term": "not for everybody"}
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the program openssl")


def made(folder, rank):
    """As the documentation says."""
    folder.mkdir(exist_ok=True)
    new = ["openssl", "req", "-x509", "-newkey", "rsa:3072", "-nodes"]
    names = ["-subj", f"/CN=party-{rank}", "-keyout", str(folder / KEY), "-out", str(folder / f"{rank}.pem")]
    subprocess.run([*new, "-days", "30", *names], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each of three parties, and one of somebody who has another key as party 1."""
    top = tmp_path_factory.mktemp("keys")
    folders = [made(top / str(rank), rank) for rank in range(3)]
    other = made(top / "other", 1)
    for folder in (*folders, other):
        for rank in range(3):
            if not (folder / f"{rank}.pem").exists():
                shutil.copy(folders[rank] / f"{rank}.pem", folder)
    return *folders, other


def says(rank, addresses, folder, wait_s):
    """What a party reads from each of those that it met, or the error."""
    try:
        channels = meet(rank, addresses, TERMS, wait_s, folder and Keys(folder, rank, len(addresses)))
    except UserError as error:
        return str(error)
    for channel in channels.values():
        channel.max_blob_bytes = 10**8
        channel.send({"from": rank}, [bytes(200_000)])
    read = {peer: channel.receive(until_s=time.monotonic() + 30) for peer, channel in channels.items()}
    for peer, channel in channels.items():
        assert read[peer].blobs == (bytes(200_000),)
        channel.send({})
        channel.receive()
        channel.close()
    return {peer: frame.header for peer, frame in read.items()}


def together(tables, used, wait_s=20.0):
    with ThreadPoolExecutor(len(used)) as parties:
        return list(parties.map(says, range(len(used)), tables, used, [wait_s] * len(used)))


def test_three_parties_meet_by_tls(folders, free_peers):
    expected = [{peer: {"from": peer} for peer in range(3) if peer != rank} for rank in range(3)]
    assert together([free_peers(3)] * 3, folders[:3]) == expected


class Tap:
    """An end of a relay that keeps what passes."""

    def __init__(self, connection, kept):
        self.connection, self.kept = connection, kept

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.connection.close()

    def recv(self, num_bytes):
        self.kept.append(self.connection.recv(num_bytes))
        return self.kept[-1]

    def sendall(self, data):
        self.kept.append(data)
        self.connection.sendall(data)


@pytest.mark.parametrize("has_keys", [True, False])
def test_who_listens_in_reads_nothing(folders, free_peers, has_keys):
    addresses, kept = free_peers(2), list[bytes]()
    with closing(Relay()) as relay:
        tap: Any = lambda end: Tap(end, kept)  # noqa: E731
        host, port = relay.forward(LOOPBACK, f"{LOOPBACK}:{addresses[0][1]}", near=tap).split(":")
        tables = [addresses, ((host, int(port)), addresses[1])]
        assert together(tables, folders[:2] if has_keys else [None, None]) == [{1: {"from": 1}}, {0: {"from": 0}}]
    passed = b"".join(kept)
    assert len(passed) > 400_000
    assert (b"not for everybody" in passed, b"private inference" in passed) == (not has_keys, not has_keys)


def test_a_wrong_key_is_refused_at_both_ends(folders, free_peers):
    addresses = free_peers(2)
    server, client = together([addresses] * 2, [folders[0], folders[3]], wait_s=1.0)
    assert "but did not (who called was no party: " in server
    line = f"party 0 (127.0.0.1:{addresses[0][1]}) must accept 1.pem of --certificates, but refused it; "
    assert client == f"{line}give all parties the same certificates."


def test_another_partys_key_is_a_wrong_key(folders, free_peers, tmp_path):
    """The helper cannot pass for the client, although all know it."""
    (mixed := tmp_path / "mixed").mkdir()
    for name, source in {KEY: folders[2] / KEY, "0.pem": folders[2] / "2.pem", "1.pem": folders[1] / "1.pem"}.items():
        shutil.copy(source, mixed / name)
    _, server = together([free_peers(2)] * 2, [mixed, folders[1]], wait_s=1.0)
    assert server.startswith("party 0 must have the certificate 0.pem of --certificates, but showed another (")


@pytest.mark.parametrize("used", [(0, None), (None, 1)])
def test_with_keys_at_one_end_only_nobody_meets(folders, free_peers, used):
    lines = together([free_peers(2)] * 2, [None if rank is None else folders[rank] for rank in used], wait_s=1.0)
    assert all("must come within 1 s, but did not" in line for line in lines)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"1.pem": None}, "1.pem does not fit: No such file or directory"),
        ({"key.pem": None}, "does not fit: No such file or directory"),
        ({"1.pem": b"x"}, "does not fit: substring not found"),
        ({"key.pem": b"x"}, "keys does not fit: "),
        ({"1.pem": "0.pem"}, "each of another key, but two of them are equal"),
        ({"0.pem": "1.pem"}, "does not fit: KEY_VALUES_MISMATCH"),
    ],
)
def test_a_folder_without_keys_is_one_line(folders, tmp_path, changed, line):
    folder = shutil.copytree(folders[0], tmp_path / "keys")
    for name, content in changed.items():
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes((folder / content).read_bytes() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=f"--certificates must be a folder with key.pem and 0.pem, 1.pem.*{line}"):
        Keys(folder, 0, 2)


def test_a_tunnel_carries_both_ways_at_once_and_takes_no_stranger(folders, free_peers):
    addresses = tuple(f"{host}:{port}" for host, port in free_peers(2))
    sent = np.random.default_rng(0).bytes(3_000_000)
    with closing(Relay()) as relay:
        rows = [tunnelled(relay, addresses, Keys(folders[rank], rank, 2)) for rank in range(2)]
        host, port = rows[0][0].split(":")
        with socket.create_server((host, int(port))) as server:
            host, port = rows[1][0].split(":")
            with socket.create_connection((host, int(port))) as caller:
                accepted, _ = server.accept()
                with accepted:
                    for end in (caller, accepted):
                        Thread(target=end.sendall, args=(sent,), daemon=True).start()
                    for end in (caller, accepted):
                        received = bytearray()
                        while len(received) < len(sent):
                            received += end.recv(1 << 16)
                        assert received == sent
            host, port = addresses[0].split(":")
            with socket.create_connection((host, int(port)), timeout=20) as stranger:
                stranger.sendall(b"PRPC" + bytes(100))
                with suppress(ConnectionResetError):
                    while stranger.recv(1 << 16):  # an alert
                        pass
            server.settimeout(0.5)
            with pytest.raises(TimeoutError):
                server.accept()


@pytest.mark.needs_engine
def test_the_engine_talks_by_tls(client, decoder, free_peers, folders):
    asked = replace(client("semi2k", num_new=1), addresses=free_peers(2))
    parts = [replace(part_of(asked, rank), certificates=folders[rank]) for rank in range(2)]
    with started(parts) as session:
        session.await_ready()
        run = session.run(0, {"tokens": interpreter.encoded(decoder(5), np.array([3, 14, 15, 9, 26]))})
        session.leave()
    assert run.sent_bytes > 0


def test_a_party_that_is_gone_is_noticed_behind_tls(folders, free_peers):
    addresses = free_peers(2)
    with ThreadPoolExecutor(1) as parties:
        other = parties.submit(meet, 1, addresses, TERMS, 20.0, Keys(folders[1], 1, 2))
        here, there = meet(0, addresses, TERMS, 20.0, Keys(folders[0], 0, 2))[1], other.result()[0]
    there.close()
    with pytest.raises(GoneError):
        here.receive()
    here.close()
