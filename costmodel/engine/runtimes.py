"""A party's runtime of the engine, how it is configured and linked, and shares of arrays."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from costmodel.engine.programs import Program
from costmodel.execution.op_functions import Array
from costmodel.protocols.derived import NUM_PARTIES
from costmodel.protocols.primitives import EngineSetting

MEMORY = "memory_"  # what the addresses of parties in one process begin with
SERVER, SHARED = 1, -1  # owners of a secret: the rank that holds the weights, or all together
WAIT_MS = 600_000  # for a message of a peer that computes
CONNECT_RETRIES, CONNECT_INTERVAL_MS = 240, 250  # parties start apart, and some machines are busy


def owner_of_weights(setting: EngineSetting) -> int:
    """Whose secret the weights are."""
    return SERVER if setting.weights == "server" else SHARED


def configuration(protocol: str, setting: EngineSetting) -> Any:
    """Defaults of the engine but for the profile, and for the threads: cheetah has set-up costs per thread."""
    from spu import libspu

    made = libspu.RuntimeConfig(
        protocol=getattr(libspu.ProtocolKind, protocol.upper()),
        field=getattr(libspu.FieldType, f"FM{setting.ring_bits}"),
        fxp_fraction_bits=setting.fraction_bits,
    )
    made.enable_pphlo_profile = True  # without it, nothing is reported
    made.max_concurrency = setting.threads
    made.experimental_enable_colocated_optimization = setting.weights == "server"  # else owners are ignored
    return made


def linked_runtime(protocol: str, setting: EngineSetting, rank: int, addresses: Sequence[str]) -> Any:
    """The runtime of a rank. The parties greet each other, so all of them at once. addresses: by rank."""
    from spu import api, libspu

    description = libspu.link.Desc()
    description.recv_timeout_ms = WAIT_MS
    description.connect_retry_times, description.connect_retry_interval_ms = CONNECT_RETRIES, CONNECT_INTERVAL_MS
    description.throttle_window_size = 0  # never wait for receipts, as in memory
    for party, address in enumerate(addresses):
        description.add_party(f"party_{party}", address)
    create = libspu.link.create_mem if addresses[rank].startswith(MEMORY) else libspu.link.create_brpc
    return api.Runtime(create(description, rank), configuration(protocol, setting))


def dealt(
    protocol: str, setting: EngineSetting, value: Array, visibility: Any = None, owner: int = SHARED
) -> list[Any]:
    """Every party's share of an array, a secret unless a visibility is given; only its owner's holds it, if any."""
    from spu import libspu

    seen = libspu.Visibility.VIS_SECRET if visibility is None else visibility
    shares: list[Any] = _io(protocol, setting).make_shares(np.asarray(value, dtype=np.float32), seen, owner)
    return shares


def rebuilt(protocol: str, setting: EngineSetting, shares: Sequence[Any]) -> Array:
    """The array that every party's share is of."""
    return _io(protocol, setting).reconstruct(list(shares))


def _io(protocol: str, setting: EngineSetting) -> Any:
    from spu import api

    return api.Io(NUM_PARTIES[protocol], configuration(protocol, setting))


def run_program(program: Program, runtime: Any) -> tuple[float, float]:
    """When a party started it and ended it, by the machine's monotonic clock; its costs go to stdout."""
    from spu import libspu

    executable = libspu.Executable(
        name=program.name, input_names=list(program.inputs), output_names=[program.output], code=program.code
    )
    start = time.monotonic()
    runtime.run(executable)
    return start, time.monotonic()


def packed(share: Any) -> list[bytes]:
    """A share as bytes, to travel: what it is a share of, then its chunks."""
    return [share.meta, *share.share_chunks]


def unpacked(parts: Sequence[bytes]) -> Any:
    """The share that `packed` gave."""
    from spu import libspu

    share = libspu.Share()
    share.meta, share.share_chunks = parts[0], list(parts[1:])
    return share
