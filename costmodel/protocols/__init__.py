"""The protocols under which a model can be priced, by their names on the command line."""

import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.network import Network
from costmodel.protocols import ckks, derived, published, sigma
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
from costmodel.protocols.sigma_primitives import SigmaSetting
from costmodel.trust import Trust

Setting: TypeAlias = EngineSetting | SigmaSetting
Loader: TypeAlias = Callable[[str | Network | None, Path | None, Any], Pricer]


def _published(network: str | Network | None, testbed: Path | None, setting: Setting | None) -> Pricer:
    """Load `published`; a UserError is raised for any option, since all of them are fitted in."""
    named = network.name if isinstance(network, Network) else network
    given = {"network": named, "testbed": testbed, "setting": setting}
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"protocol published has its {name} fitted in, but got {name} {str(value)!r}; leave it out."
            )
    return published.load()


LOADERS: dict[str, Loader] = {
    "published": _published,
    **{name: partial(derived.load, name) for name in ENGINE_PROTOCOLS},
    "sigma": sigma.load,
    "ckks": ckks.load,
}
PROTOCOLS = tuple(LOADERS)
TRUST: dict[str, Trust] = {
    "published": published.TRUST,
    **{name: protocol.trust for name, protocol in ENGINE_PROTOCOLS.items()},
    "sigma": sigma.TRUST,
    "ckks": ckks.TRUST,
}
# protocol -> the class of its settings; `published` and `ckks` have none, because theirs are fitted in
SETTINGS: dict[str, type[Setting]] = {
    **{name: protocol.setting for name, protocol in ENGINE_PROTOCOLS.items()},
    "sigma": SigmaSetting,
}


def load_pricer(
    protocol: str = "published",
    network: str | Network | None = None,
    testbed: str | os.PathLike[str] | None = None,
    setting: Setting | None = None,
) -> Pricer:
    """Return the pricer of a protocol; None stands for the protocol's default network, testbed or setting.

    A UserError is raised for an unknown protocol, or a network, testbed or setting that the protocol cannot use.
    """
    _check(protocol)
    return LOADERS[protocol](network, None if testbed is None else Path(testbed), setting)


def setting_of(protocol: str, **flags: Any) -> Setting | None:
    """Return the setting of a protocol from the flags that are not None; None if there are none.

    A UserError is raised for an unknown protocol, or a flag or value that the protocol does not have.
    """
    _check(protocol)
    given = {name: value for name, value in flags.items() if value is not None}
    kind = SETTINGS.get(protocol)
    known = {field.name for field in fields(kind)} if kind else set()
    if unknown := [name for name in given if name not in known]:
        flag = unknown[0].replace("_", "-")
        raise UserError(
            f"protocol {protocol} has its {flag} fitted in, but got --{flag} {given[unknown[0]]}; leave it out."
        )
    return kind(**given) if kind and given else None


def _check(protocol: str) -> None:
    if protocol not in LOADERS:
        raise UserError(f"protocol must be one of {', '.join(PROTOCOLS)}, but got {protocol!r}.")
