"""The engines that run op graphs here, by the protocols that they run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from costmodel.errors import UserError
from costmodel.ops import Op
from costmodel.protocols import PROTOCOLS
from costmodel.protocols import crypten as crypten_formulas
from costmodel.protocols.derived import check_setting
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import Comm, one_by_one


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """package: its name. link: what its parties talk by.

    walk: the cost of each op in a run of all of them, in order. Raises UserError for an op without formula.
    is_timed: whether testbeds of its seconds and memory are kept, and its rounds are measured by delays, as it does not
    count them.
    """

    package: str
    link: str
    walk: Callable[[Sequence[Op], Any], tuple[Comm, ...]]
    is_timed: bool


def _walk(protocol: str, some: Sequence[Op], setting: Any) -> tuple[Comm, ...]:
    check_setting(protocol, setting)
    return ENGINE_PROTOCOLS[protocol].walk(some, setting)


ENGINES: dict[str, Engine] = {
    **{name: Engine(package="spu", link="tcp", walk=partial(_walk, name), is_timed=True) for name in ENGINE_PROTOCOLS},
    "crypten": Engine(
        package="crypten", link="sockets", walk=partial(one_by_one, crypten_formulas.comm), is_timed=False
    ),
}


def engine_of(protocol: str) -> Engine:
    """Raises UserError for a protocol that no engine runs here."""
    if protocol in ENGINES:
        return ENGINES[protocol]
    known = ", ".join(ENGINES)
    if protocol in PROTOCOLS:
        raise UserError(f"protocol {protocol} has no engine to compare with; choose one of {known}.")
    raise UserError(f"protocol must be one of {known}, but got {protocol!r}.")
