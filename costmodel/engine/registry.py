"""The MPC engines, SecretFlow-SPU and CrypTen: which one runs a protocol, and the commands that install them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from costmodel.errors import UserError
from costmodel.ops import Op
from costmodel.protocols import PROTOCOLS
from costmodel.protocols.derived import check_setting
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import Comm, EngineSetting

INSTALL = "python3.11 -m pip install 'spu==0.9.5' 'numpy<2'"
CRYPTEN_VERSION = "0.4.1"  # `crypten_arrays` replaces internal parts of this version
INSTALL_CRYPTEN = f"python -m pip install --no-deps crypten=={CRYPTEN_VERSION}"
NEWEST_PYTHON = (3, 11)  # SecretFlow-SPU has wheels for 3.10 and 3.11


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An MPC engine.

    package: name of its Python package. link: kind of connection between its parties, for reports. counts_rounds:
        whether it counts rounds; if not, rounds are measured by adding delays.
    """

    package: str
    link: str
    counts_rounds: bool


ENGINES = {
    engine.package: engine
    for engine in (
        Engine(package="spu", link="tcp", counts_rounds=False),
        Engine(package="crypten", link="sockets", counts_rounds=True),
    )
}


def engine_of(protocol: str) -> Engine:
    """Return the engine that runs a protocol. Raise UserError if no engine does."""
    if protocol in ENGINE_PROTOCOLS:
        return ENGINES[ENGINE_PROTOCOLS[protocol].engine]
    known = ", ".join(ENGINE_PROTOCOLS)
    if protocol in PROTOCOLS:
        raise UserError(f"protocol {protocol} has no engine to compare with; choose one of {known}.")
    raise UserError(f"protocol must be one of {known}, but got {protocol!r}.")


def walk(protocol: str, some: Sequence[Op], setting: EngineSetting) -> tuple[Comm, ...]:
    """Return the predicted communication of each of the ops `some`, in a run that executes them in this order.

    Raise UserError if no engine runs the protocol, the protocol does not support the setting, an op has no formula, or
    the ring is too small for an op.
    """
    engine_of(protocol)
    check_setting(protocol, setting)
    return ENGINE_PROTOCOLS[protocol].walk(some, setting)


def check_installed(protocol: str) -> None:
    """Raise UserError, with the command to run, if a protocol's engine is missing or CrypTen is not CRYPTEN_VERSION."""
    if protocol == "crypten":
        if not all(map(find_spec, ("crypten", "torch"))):
            raise UserError(f"the engine CrypTen is not installed; run: {INSTALL_CRYPTEN}")
        if (have := version("crypten")) != CRYPTEN_VERSION:
            raise UserError(f"CrypTen must be {CRYPTEN_VERSION}, but {have} is installed; run: {INSTALL_CRYPTEN}")
    elif find_spec("spu") is None:
        have, is_old = ".".join(map(str, sys.version_info[:2])), sys.version_info[:2] <= NEWEST_PYTHON
        no_wheel = "" if is_old else f", and has no wheel for this Python {have}, where --protocol crypten runs"
        other = ", or give --protocol crypten, which runs on any Python" if is_old else ""
        raise UserError(
            f"the MPC engine SecretFlow-SPU is not installed{no_wheel}; it needs Python < 3.12 and numpy < 2; run: "
            f"{INSTALL}{other}"
        )
