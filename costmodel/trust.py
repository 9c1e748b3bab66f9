"""Whom you must trust: the number of parties, the adversary, and who makes the correlated randomness."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """The assumptions under which a protocol keeps inputs and weights secret.

    num_parties: Number of computing parties in prices and measurements. more_parties: Whether there may be more.
    adversary: What corrupted parties do; semi-honest ones follow the protocol, but try to learn what they can.
    max_corrupted: Greatest number of parties, whichever they are, that may be corrupted and pool what they see.
    randomness: Who makes the correlated randomness, in words. dealer: Whether a trusted dealer makes it.
    """

    num_parties: int
    adversary: str = "semi-honest"
    max_corrupted: int = 1
    randomness: str
    dealer: bool
    more_parties: bool = False

    @property
    def threshold(self) -> str:
        """`honest majority` if fewer than half of the parties may be corrupted, else `dishonest majority`."""
        return "honest majority" if 2 * self.max_corrupted < self.num_parties else "dishonest majority"


def facts(trust: Trust) -> dict[str, Any]:
    """Return all fields of a trust, and its threshold, as plain data."""
    return {**asdict(trust), "threshold": trust.threshold}


def shown(public_layers: str | None, client_layers: int | None = None) -> str:
    """Return in words who learns what from public layers, and from layers of the client; empty if both are None."""
    words = ""
    if public_layers is not None:
        words += (
            f"; public layers {public_layers}: every party has their weights, and none sees more by it of the tokens, "
            "of what goes through any layer, or of other layers' weights"
        )
    if client_layers is not None:
        words += (
            f"; {at_client(client_layers)} at the client: it has their weights, computes them in the clear from its "
            "own tokens, knows the stream behind them, and could share any other; no other party sees any of it"
        )
    return words


def at_client(client_layers: int) -> str:
    """Return in words the part of a model that the client computes: the embedding and the first layers, if any."""
    layers = "layer" if client_layers == 1 else f"{client_layers} layers"
    return f"embedding and first {layers}" if client_layers else "embedding"


def described(trust: Trust) -> str:
    """Return a trust in words, in one line."""
    return (
        f"{trust.num_parties} parties{' (or more)' if trust.more_parties else ''}, {trust.adversary}, "
        f"{trust.threshold} (at most {trust.max_corrupted} corrupted); "
        f"correlated randomness: {trust.randomness}"
    )


def caption(trust: Trust) -> str:
    """Return a trust in a few words, for figures."""
    dealer = ", trusted dealer" if trust.dealer else ""
    return f"{trust.num_parties} parties, {trust.adversary}, {trust.threshold}{dealer}"
