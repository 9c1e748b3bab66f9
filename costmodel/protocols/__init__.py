"""The protocols a model can be priced under, by the names the command line knows."""

from collections.abc import Callable

from costmodel.estimate import Pricer
from costmodel.protocols import published

# name -> pricer on a network (None: not given)
PROTOCOLS: dict[str, Callable[[str | None], Pricer]] = {
    "published": published.load,
}


def load_pricer(protocol: str = "published", network: str | None = None) -> Pricer:
    """The pricer of a protocol on a network; None is the protocol's default, or the one fitted into it.

    Raises ValueError for an unknown protocol, or a network that the protocol cannot take.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, but got {protocol!r}.")
    return PROTOCOLS[protocol](network)
