"""Whom a price trusts: how many parties, against whom they are safe, and who makes their correlated randomness."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """What has to hold for a protocol to hide anything.

    num_parties: that compute, as priced and measured. more_parties: whether there may be more.
    adversary: what corrupted parties do. max_corrupted: how many of the parties may be, whoever they are. Every
        protocol here holds against one that is semi-honest.
    randomness: who makes the correlated randomness, in words. dealer: whether that is someone to be trusted.
    """

    num_parties: int
    adversary: str = "semi-honest"
    max_corrupted: int = 1
    randomness: str
    dealer: bool
    more_parties: bool = False

    @property
    def threshold(self) -> str:
        """The corruption threshold by its name."""
        return "honest majority" if 2 * self.max_corrupted < self.num_parties else "dishonest majority"


def facts(trust: Trust) -> dict[str, Any]:
    """All of it as plain data."""
    return {**asdict(trust), "threshold": trust.threshold}


def shown(public_layers: str | None, client_layers: int | None = None) -> str:
    """What to say behind it where the weights of some layers are public, or at the client."""
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
    """What of a model is there."""
    layers = "layer" if client_layers == 1 else f"{client_layers} layers"
    return f"embedding and first {layers}" if client_layers else "embedding"


def described(trust: Trust) -> str:
    """All of it in a line."""
    return (
        f"{trust.num_parties} parties{' (or more)' if trust.more_parties else ''}, {trust.adversary}, "
        f"{trust.threshold} (at most {trust.max_corrupted} corrupted); "
        f"correlated randomness: {trust.randomness}"
    )


def caption(trust: Trust) -> str:
    """The shortest form, for figures."""
    dealer = ", trusted dealer" if trust.dealer else ""
    return f"{trust.num_parties} parties, {trust.adversary}, {trust.threshold}{dealer}"
