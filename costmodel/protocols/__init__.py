"""The protocols a model can be priced under, by the names the command line knows."""

from pathlib import Path

from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.network import Network
from costmodel.protocols import derived, published
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
from costmodel.trust import Trust

PROTOCOLS = ("published", *ENGINE_PROTOCOLS)
TRUST: dict[str, Trust] = {
    "published": published.TRUST,
    **{name: protocol.trust for name, protocol in ENGINE_PROTOCOLS.items()},
}


def load_pricer(
    protocol: str = "published",
    network: str | Network | None = None,
    testbed: Path | None = None,
    setting: EngineSetting | None = None,
) -> Pricer:
    """The pricer of a protocol; None is the protocol's own network, testbed and setting.

    Raises UserError for an unknown protocol, or a network, testbed or setting that the protocol cannot take.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol must be one of {', '.join(PROTOCOLS)}, but got {protocol!r}.")
    if protocol != "published":
        return derived.load(protocol, network, testbed, setting)
    named = network.name if isinstance(network, Network) else network
    given = {"network": named, "testbed": testbed, "weights": setting and setting.weights}
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"protocol published has its {name} fitted in, but got {name} {str(value)!r}; leave it out."
            )
    return published.load()
