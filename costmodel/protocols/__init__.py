"""The protocols under which the cost of a model is computed, by their names on the command line."""

import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from costmodel.config.files import MOST_YAML, read_bytes
from costmodel.errors import UserError
from costmodel.estimate import Pricer, cost_model_id
from costmodel.network import Network, load_network
from costmodel.protocols import ckks, derived, published, sigma
from costmodel.protocols.derived import ByFormula
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
from costmodel.protocols.sigma_primitives import SigmaSetting
from costmodel.trust import Trust

Setting: TypeAlias = EngineSetting | SigmaSetting
Loader: TypeAlias = Callable[[str | Network | None, Path | None, Any], Pricer]


def _published(network: str | Network | None, testbed: Path | None, setting: Setting | None) -> Pricer:
    """Load `published`; a UserError is raised for a network or testbed, since both are fitted in."""
    given = {"network": network.name if isinstance(network, Network) else network, "testbed": testbed}
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
# protocol -> the class of its settings; `published` and `ckks` are absent, because they have no setting to choose
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
    """Return the `Pricer` of a protocol; None stands for the protocol's default network, testbed or setting.

    protocol: one of `PROTOCOLS`, or `module:Class`, an importable subclass of `ByFormula`. network: a key of `NETWORKS`
    (`costmodel.network`), the path of a .yaml file, or a Network. testbed: the path of a .yaml file or, under `ckks`,
    also a key of `ckks.CARDS`. setting: an instance of `SETTINGS[protocol]`. A UserError is raised for an unknown
    protocol, or a network, testbed or setting that the protocol cannot use.
    """
    _check(protocol)
    kind = SETTINGS.get(protocol)
    if setting is not None and (kind is None or not isinstance(setting, kind)):
        needs, got = f"a setting of type {kind.__name__}" if kind else "no setting", type(setting).__name__
        raise UserError(f"protocol {protocol} must have {needs}, but got one of type {got}; leave it out.")
    path = None if testbed is None else Path(testbed)
    return LOADERS[protocol](network, path, setting) if protocol in LOADERS else _own(protocol, network, path)


def setting_of(protocol: str, **flags: Any) -> Setting | None:
    """Return a protocol's setting with the flags that are not None as its fields; None if every flag is None.

    None stands for the default setting. A UserError is raised for an unknown protocol, a flag that is no field of the
    protocol's setting, or a value that the setting does not allow.
    """
    _check(protocol)
    given = {name: value for name, value in flags.items() if value is not None}
    kind = SETTINGS.get(protocol)
    known = {field.name for field in fields(kind)} if kind else set()
    if unknown := [name for name in given if name not in known]:
        flag = unknown[0].replace("_", "-")
        raise UserError(f"protocol {protocol} takes no --{flag}, but got --{flag} {given[unknown[0]]}; leave it out.")
    return kind(**given) if kind and given else None


def _check(protocol: str) -> None:
    if protocol not in LOADERS and ":" not in protocol:
        raise UserError(
            f"protocol must be one of {', '.join(PROTOCOLS)}, or module:Class of your own, but got {protocol!r:.80}."
        )


def _own(protocol: str, network: str | Network | None, testbed: Path | None) -> Pricer:
    """Make a pricer of `module:Class`; its cost_model_id is a hash of its source file, its testbed and the link."""
    module, _, attribute = protocol.partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except Exception as error:  # whatever a user's module raises
        raise UserError(f"protocol {protocol!r:.80} cannot be loaded: {error}.") from None
    if not (isinstance(kind, type) and issubclass(kind, ByFormula)):
        raise UserError(f"protocol {protocol!r:.80} must be a subclass of costmodel.protocols.derived.ByFormula.")
    link, source, given = load_network(network), inspect.getsourcefile(kind), dict[str, Any]()
    if testbed is not None:
        if "testbed" not in {field.name for field in fields(kind)}:
            raise UserError(f"protocol {protocol} has no field `testbed`, but got --testbed {testbed}; leave it out.")
        given["testbed"] = testbed
    files = [read_bytes(path, MOST_YAML) for path in (source and Path(source), testbed) if path]
    identity = cost_model_id(b"".join(files), protocol, link.bandwidth_bits_per_s, link.rtt_s, link.duplex)
    try:
        return kind(protocol=protocol, network=link.name, cost_model_id=identity, link=link, **given)
    except TypeError as error:  # a method that is missing, or a field without a default
        raise UserError(f"protocol {protocol!r:.80} cannot be made: {error}.") from None
