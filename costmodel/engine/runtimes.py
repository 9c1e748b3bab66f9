"""The SPU runtime of a party, with its configuration and link, and shares of arrays."""

import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np

from costmodel.engine.programs import Program
from costmodel.errors import UserError
from costmodel.execution.op_functions import Array
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

INSTALL = "python3.11 -m pip install 'spu==0.9.5' 'numpy<2'"
CRYPTEN_VERSION = "0.4.1"  # `crypten_runtime` replaces internal parts of this version
INSTALL_CRYPTEN = f"python -m pip install --no-deps crypten=={CRYPTEN_VERSION}"
NEWEST_PYTHON = (3, 11)  # the engine has wheels for 3.10 and 3.11
SERVER, SHARED = 1, -1  # owners of a secret: the rank of the server, or all parties together
WAIT_MS = 600_000  # longest wait for a message of a peer that computes
CONNECT_RETRIES, CONNECT_INTERVAL_MS = 240, 250  # parties do not start at the same moment, and machines may be busy


def check_installed(protocol: str) -> None:
    """Raise UserError, with the command to run, if the protocol's engine cannot be imported here."""
    if protocol == "crypten":
        if not all(map(find_spec, ("crypten", "torch"))):
            raise UserError(f"the engine CrypTen is not installed; run: {INSTALL_CRYPTEN}")
        if (have := version("crypten")) != CRYPTEN_VERSION:
            raise UserError(f"CrypTen must be {CRYPTEN_VERSION}, but {have} is installed; run: {INSTALL_CRYPTEN}")
    elif find_spec("spu") is None:
        have, is_old = ".".join(map(str, sys.version_info[:2])), sys.version_info[:2] <= NEWEST_PYTHON
        no_wheel = "" if is_old else f", and has no wheel for this Python {have}, where --protocol crypten runs"
        raise UserError(
            f"the MPC engine SecretFlow-SPU is not installed{no_wheel}; it needs Python < 3.12 and numpy < 2; run: "
            f"{INSTALL}"
        )


def owner_of_weights(setting: EngineSetting) -> int:
    """Return the owner of the weights: SERVER or SHARED."""
    return SERVER if setting.weights == "server" else SHARED


def configuration(protocol: str, setting: EngineSetting) -> Any:
    """Return the engine's defaults with the profile on and the setting's threads; cheetah preprocesses for each."""
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


def linked_runtime(protocol: str, setting: EngineSetting, rank: int, addresses: Sequence[str]) -> tuple[Any, Any]:
    """Return the runtime of a rank and its link; all parties connect to each other now. `addresses` are by rank."""
    from spu import api, libspu

    description = libspu.link.Desc()
    description.recv_timeout_ms = WAIT_MS
    description.connect_retry_times, description.connect_retry_interval_ms = CONNECT_RETRIES, CONNECT_INTERVAL_MS
    description.throttle_window_size = 0  # never wait for receipts
    for party, address in enumerate(addresses):
        description.add_party(f"party_{party}", address)
    link = libspu.link.create_brpc(description, rank)
    return api.Runtime(link, configuration(protocol, setting)), link


def make_shares(
    protocol: str, setting: EngineSetting, value: Array, visibility: Any = None, owner: int = SHARED
) -> list[Any]:
    """Return every party's share of an array, secret by default; with an owner, only the owner's holds it."""
    from spu import libspu

    seen = libspu.Visibility.VIS_SECRET if visibility is None else visibility
    shares: list[Any] = _io(protocol, setting).make_shares(np.asarray(value, dtype=np.float32), seen, owner)
    return shares


def reconstruct(protocol: str, setting: EngineSetting, shares: Sequence[Any]) -> Array:
    """Return the array that the shares of all parties make up."""
    return _io(protocol, setting).reconstruct(list(shares))


def _io(protocol: str, setting: EngineSetting) -> Any:
    from spu import api

    return api.Io(ENGINE_PROTOCOLS[protocol].trust.num_parties, configuration(protocol, setting))


def run_program(program: Program, runtime: Any) -> tuple[float, float]:
    """Run a program, whose costs go to stdout; return its start and end on the machine's monotonic clock."""
    from spu import libspu

    executable = libspu.Executable(
        name=program.name, input_names=list(program.inputs), output_names=[program.output], code=program.code
    )
    start = time.monotonic()
    runtime.run(executable)
    return start, time.monotonic()


def packed(share: Any) -> list[bytes]:
    """Return a share as bytes that can be sent: its metadata, then its chunks."""
    return [share.meta, *share.share_chunks]


def unpacked(parts: Sequence[bytes]) -> Any:
    """Return the share that `packed` turned into bytes."""
    from spu import libspu

    share = libspu.Share()
    share.meta, share.share_chunks = parts[0], list(parts[1:])
    return share
