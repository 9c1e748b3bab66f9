"""A party's runtime under SecretFlow-SPU: it runs programs that the client compiled, and reads costs from a log."""

import gc
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from costmodel.engine.channel import Blob, Peers
from costmodel.engine.children import LOG, Progress, read_all
from costmodel.engine.links import Relay, tunnelled
from costmodel.engine.plan import CLIENT, SERVER, SHARED, Assignment
from costmodel.engine.programs import Compiled, Program, compile_steps, from_blobs, operand_visibility, to_blobs
from costmodel.engine.runtime import Runtime, Traffic
from costmodel.execution.op_functions import Array
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

_LINK = re.compile(r"Link details: total send bytes (?P<sent_bytes>\d+),.* send actions (?P<messages>\d+),")
PATIENCE_S = 60.0  # longest wait for the log entry of a finished program, on a busy machine
WAIT_MS = 600_000  # longest wait for a message of a peer that is still computing
CONNECT_RETRIES, CONNECT_INTERVAL_MS = 240, 250  # parties do not start at the same moment, and machines may be busy
# An engine that calls before its peer listens calls again after 0.15 s, and not 1 s as by default, because the
# socket is tried again after 0.1 s. Each later wait is 1 s longer; all five together take 11 s.
RETRIES, RETRY_MS, LONGER_MS = 5, 150, 1_000


def configuration(protocol: str, setting: EngineSetting) -> Any:
    """Return the engine's configuration for a protocol and setting; it logs the bytes and messages of every program."""
    from spu import libspu

    made = libspu.RuntimeConfig(
        protocol=getattr(libspu.ProtocolKind, protocol.upper()),
        field=getattr(libspu.FieldType, f"FM{setting.ring_bits}"),
        fxp_fraction_bits=setting.fraction_bits,
    )
    made.enable_pphlo_profile = True  # otherwise nothing is logged
    made.max_concurrency = setting.threads
    made.experimental_enable_colocated_optimization = setting.weights == "server"  # else owners are ignored
    return made


def shares_io(protocol: str, setting: EngineSetting) -> Any:
    """Return the engine's converter of arrays to shares and back."""
    from spu import api

    return api.Io(ENGINE_PROTOCOLS[protocol].trust.num_parties, configuration(protocol, setting))


def make_shares(protocol: str, setting: EngineSetting, value: Array, op: Op | None = None) -> list[Any]:
    """Return, for every party, its share of an input or, with `op`, of a weight of the op (see `setting.weights`)."""
    from spu import libspu

    seen = libspu.Visibility.VIS_SECRET if op is None else operand_visibility(op)
    owner = SHARED if op is None or setting.weights != "server" else SERVER
    shares: list[Any] = shares_io(protocol, setting).make_shares(np.asarray(value, dtype=np.float32), seen, owner)
    return shares


def entries(log: str) -> list[Traffic]:
    """Return the bytes and messages of every program in the engine's log, in the order in which they ran."""
    return [Traffic(int(match["sent_bytes"]), int(match["messages"])) for match in _LINK.finditer(log)]


@cache
def _import_engine() -> None:
    import_module("spu.api")
    gc.freeze()  # its modules are no garbage, and to look through them takes a tenth of a second at the end of each job


class SpuRuntime(Runtime):
    """The runtime of a party under SecretFlow-SPU; the client writes to `progress` the name of the op it compiles."""

    def __init__(self, assignment: Assignment, peers: Peers, progress: Progress) -> None:
        _import_engine()  # takes a second, so all parties do it at the same time
        self.assignment, self.peers, self.progress = assignment, peers, progress
        self.protocol, self.setting = assignment.protocol, assignment.setting
        self.keepers: list[Program] = []
        self.steps: Compiled = []
        self.log_position = 0  # number of bytes of this process's output that were read
        self.relay = Relay()  # the engine's own TLS takes plain connections too
        self.runtime: Any = None
        self.link: Any = None

    def shares(self, value: Array, op: Op | None = None) -> list[Any]:
        return make_shares(self.protocol, self.setting, value, op)

    def packed(self, share: Any) -> list[bytes]:
        """Return the metadata of the share, such as its type and shape, then its chunks."""
        return [share.meta, *share.share_chunks]

    def unpacked(self, parts: Sequence[Blob]) -> Any:
        from spu import libspu

        share = libspu.Share()
        share.meta, *share.share_chunks = map(bytes, parts)
        return share

    def opened(self, shares: Sequence[Any]) -> Array:
        value: Array = shares_io(self.protocol, self.setting).reconstruct(list(shares))
        return value

    def prepare(self, steps: tuple[OpGraph, ...]) -> None:
        """Compile the programs if this party is the client, which sends them to the others; otherwise receive them."""
        if self.assignment.rank == CLIENT:
            compiled = compile_steps(steps, self.setting, self.progress.write)
            self.progress.write("")
            self.peers.send_all({"kind": "programs"}, to_blobs(compiled))
        else:
            compiled = from_blobs(self.peers.receive(CLIENT).blobs)
        self.keepers, *self.steps = compiled

    def connect(self) -> None:
        from spu import api, libspu

        description = libspu.link.Desc()
        description.recv_timeout_ms = WAIT_MS
        description.connect_retry_times, description.connect_retry_interval_ms = CONNECT_RETRIES, CONNECT_INTERVAL_MS
        again = description.retry_opts
        again.max_retry, again.retry_interval_ms, again.retry_interval_incr_ms = RETRIES, RETRY_MS, LONGER_MS
        description.throttle_window_size = 0  # never wait for receipts
        addresses, keys = self.assignment.engine_addresses, self.assignment.keys
        if keys is not None:
            addresses = tunnelled(self.relay, addresses, keys)
        for party, address in enumerate(addresses):
            description.add_party(f"party_{party}", address)
        self.link = libspu.link.create_brpc(description, self.assignment.rank)
        self.runtime = api.Runtime(self.link, configuration(self.protocol, self.setting))

    def hold(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.runtime.set_var(name, value)

    def start(self) -> None:
        for keeper in self.keepers:
            self._run(keeper)
        self.traffic(len(self.keepers))

    def run(self, step: int, index: int, node: Node) -> None:
        self._run(self.steps[step][index])

    def _run(self, program: Program) -> None:
        from spu import libspu

        name, inputs, output, code = program
        executable = libspu.Executable(name=name, input_names=list(inputs), output_names=[output], code=code)
        self.runtime.run(executable)

    def share(self, variable: str) -> Any:
        return self.runtime.get_var(variable)

    def drop(self, variable: str) -> None:
        self.runtime.del_var(variable)

    def traffic(self, num_ops: int) -> list[Traffic]:
        """Return the bytes and messages of each of the last `num_ops` programs, once the log has all of them."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            content = read_all(LOG, self.log_position)
            programs = entries(content.decode(errors="replace"))
            if len(programs) >= num_ops or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert len(programs) == num_ops, f"the profile of {num_ops} programs has {len(programs)} entries"
        self.log_position += len(content)
        return programs

    def stop(self) -> None:
        """Wait until the other parties' links stop. This link stays open, since a party may await a last receipt."""
        self.runtime = None
        gc.collect()
        self.link.stop_link()
        self.relay.close()
