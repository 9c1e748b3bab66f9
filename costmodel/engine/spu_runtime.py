"""A party's runtime of SecretFlow-SPU: the client compiles the programs, and costs come from the engine's profile."""

import gc
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from costmodel.engine.assignment import CLIENT, Assignment
from costmodel.engine.channel import Blob, Peers
from costmodel.engine.children import PROGRESS
from costmodel.engine.programs import Compiled, compile_steps, from_blobs, operand_visibility, to_blobs
from costmodel.engine.runtime import Runtime, Traffic
from costmodel.engine.runtimes import (
    SHARED,
    linked_runtime,
    make_shares,
    owner_of_weights,
    packed,
    reconstruct,
    run_program,
    unpacked,
)
from costmodel.execution.op_functions import Array
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.primitives import EngineSetting

_LINK = re.compile(r"Link details: total send bytes (?P<sent_bytes>\d+),.* send actions (?P<messages>\d+),")
PATIENCE_S = 5.0  # the profile of a finished program is in the log within this time


def entries(log: str) -> list[Traffic]:
    """Return bytes and messages of every program in a log, in the order in which the programs ran."""
    return [Traffic(int(match["sent_bytes"]), int(match["messages"])) for match in _LINK.finditer(log)]


@dataclass(kw_only=True, slots=True)
class Log:
    """The log of this process, to which the engine writes its profile, and the position up to which it was read."""

    path: Path
    position: int = 0

    def traffic(self, num_programs: int) -> list[Traffic]:
        """Return bytes and messages of each of the last `num_programs` programs."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self.path.open("rb") as file:
                file.seek(self.position)
                content = file.read()
            programs = entries(content.decode(errors="replace"))
            if len(programs) >= num_programs or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert len(programs) == num_programs, f"the profile of {num_programs} programs has {len(programs)} entries"
        self.position += len(content)
        return programs


class SpuRuntime(Runtime):
    """The runtime of a party under SecretFlow-SPU; `log` is the file with the output of this process."""

    def __init__(self, assignment: Assignment, peers: Peers, log: Path) -> None:
        import_module("spu.api")  # takes a second, so all parties do it at the same time
        self.assignment, self.peers, self.log = assignment, peers, Log(path=log)
        assert isinstance(assignment.setting, EngineSetting)
        self.protocol, self.setting = assignment.protocol, assignment.setting
        self.compiled = Compiled(steps=(), keepers=())
        self.runtime: Any = None
        self.link: Any = None

    def shares(self, value: Array, op: Op | None = None) -> list[Any]:
        visibility, owner = (None, SHARED) if op is None else (operand_visibility(op), owner_of_weights(self.setting))
        return make_shares(self.protocol, self.setting, value, visibility, owner)

    def packed(self, share: Any) -> list[bytes]:
        return packed(share)

    def unpacked(self, parts: Sequence[Blob]) -> Any:
        return unpacked(list(map(bytes, parts)))

    def opened(self, shares: Sequence[Any]) -> Array:
        return reconstruct(self.protocol, self.setting, shares)

    def prepare(self, steps: tuple[OpGraph, ...]) -> None:
        """Compile the programs if this party is the client, which sends them to the others; otherwise receive them."""
        if self.assignment.rank == CLIENT:
            self.compiled = compile_steps(steps, self.setting, Path(PROGRESS).write_text)
            Path(PROGRESS).unlink()
            self.peers.send_all({"kind": "programs"}, to_blobs(self.compiled))
        else:
            self.compiled = from_blobs(self.peers.receive(CLIENT).blobs)

    def connect(self) -> None:
        rank, addresses = self.assignment.rank, self.assignment.engine_addresses
        self.runtime, self.link = linked_runtime(self.protocol, self.setting, rank, addresses)

    def hold(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.runtime.set_var(name, value)

    def start(self) -> None:
        for keeper in self.compiled.keepers:
            run_program(keeper, self.runtime)
        self.log.traffic(len(self.compiled.keepers))

    def run(self, step: int, index: int, node: Node) -> None:
        run_program(self.compiled.steps[step][index], self.runtime)

    def share(self, variable: str) -> Any:
        return self.runtime.get_var(variable)

    def drop(self, variable: str) -> None:
        self.runtime.del_var(variable)

    def traffic(self, num_ops: int) -> list[Traffic]:
        return self.log.traffic(num_ops)

    def stop(self) -> None:
        """Stop the link, which still sends while it stops, and waits for what the other parties send."""
        self.runtime = None
        gc.collect()
        self.link.stop_link()
