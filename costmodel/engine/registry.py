"""The engines that run op graphs here, by the protocols that they run."""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.errors import UserError
from costmodel.ops import Op
from costmodel.protocols import PROTOCOLS
from costmodel.protocols.derived import check_setting
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import Comm, EngineSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """An MPC engine.

    package: its name. link: the connections between its parties. counts_rounds: whether it counts rounds; if not, they
        are measured by adding delays.
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
    """Return the engine of a protocol. Raises UserError for a protocol that no engine runs here."""
    if protocol in ENGINE_PROTOCOLS:
        return ENGINES[ENGINE_PROTOCOLS[protocol].engine]
    known = ", ".join(ENGINE_PROTOCOLS)
    if protocol in PROTOCOLS:
        raise UserError(f"protocol {protocol} has no engine to compare with; choose one of {known}.")
    raise UserError(f"protocol must be one of {known}, but got {protocol!r}.")


def walk(protocol: str, some: Sequence[Op], setting: EngineSetting) -> tuple[Comm, ...]:
    """Return the cost of each op in a run of all of them, in order.

    Raises UserError for a protocol without engine, a setting that the protocol does not have, or an op without formula.
    """
    engine_of(protocol)
    check_setting(protocol, setting)
    return ENGINE_PROTOCOLS[protocol].walk(some, setting)
