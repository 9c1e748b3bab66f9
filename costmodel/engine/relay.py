"""A TCP relay that holds everything it carries for a time: a link of known one-way delay, without any privilege.

It is a process of its own, so that it carries on while others compute. It is told on stdin, one line each, where to
listen and what to forward to (`forward HOST HOST:PORT`, answered by the address it listens on) or how long to hold what
it reads from now on (`delay SECONDS`); it ends with its stdin. Chunks keep their order and wait side by side, so the
delay takes no bandwidth away. What it adds itself, a fraction of a millisecond per message, is the same at any delay.
"""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from costmodel.errors import StoppedError

CHUNK_BYTES = 1 << 16  # what one read takes at most; any size works


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Relay:
    """A running relay. Its methods raise StoppedError if it has ended."""

    process: subprocess.Popen[str]

    def forward(self, host: str, target: str) -> str:
        """The address, on a free port of `host`, that now leads to `target`, an address too."""
        return self._ask(f"forward {host} {target}")

    def set_delay(self, delay_s: float) -> None:
        """Sets the delay of what is read from now on, in both directions."""
        self._ask(f"delay {delay_s!r}")

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and answers nothing
            print(line, file=self.process.stdin, flush=True)
        if not (answer := self.process.stdout.readline().strip()):
            raise StoppedError(f"the relay of messages ended (status {self.process.wait()}).")
        return answer


@contextmanager
def started_relay() -> Iterator[Relay]:
    """A relay that runs until the end of the block."""
    command = [sys.executable, "-m", "costmodel.engine.relay"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Relay(process=process)
        finally:
            process.kill()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # of what it was not told any more
                process.stdin.close()


@dataclass(kw_only=True, slots=True)
class _Delay:
    seconds: float = 0.0


async def _serve() -> None:
    delay, servers, commands = _Delay(), [], asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := (await commands.readline()).decode():
        match line.split():
            case ["forward", host, target]:
                servers.append(await _forward(host, target, delay))
                host, port = servers[-1].sockets[0].getsockname()
                print(f"{host}:{port}", flush=True)
            case ["delay", seconds]:
                delay.seconds = float(seconds)
                print("ok", flush=True)


async def _forward(host: str, target: str, delay: _Delay) -> asyncio.Server:
    target_host, target_port = target.split(":")

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(target_host, int(target_port))
        except OSError:  # the party does not listen yet; its peer will try again
            writer.close()
            return
        await asyncio.gather(_carry(reader, far_writer, delay), _carry(far_reader, writer, delay))

    return await asyncio.start_server(join, host, 0)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: _Delay) -> None:
    """One direction: every chunk is written `delay` after it was read."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    release = asyncio.create_task(_release(held, writer))
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            held.put_nowait((time.monotonic() + delay.seconds, chunk))
    except ConnectionError:
        pass  # a party that ended
    held.put_nowait((time.monotonic() + delay.seconds, b""))
    await release


async def _release(held: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    while True:
        due, chunk = await held.get()
        if (wait_s := due - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        if not chunk:
            writer.close()
            return
        try:
            writer.write(chunk)
            await writer.drain()
        except ConnectionError:
            return


if __name__ == "__main__":
    asyncio.run(_serve())
