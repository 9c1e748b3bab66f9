"""What a dealer's keys take beside a price: to keep, to send, and in money; for people (a line) and programs (JSON)."""

from dataclasses import dataclass

from costmodel.config.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtKeys:
    """Keys for one run.

    party_bytes: that each party keeps until then. sent_bytes: that the dealer sends, to all. network_s: if it sends to
    each over a link of its own, as fast as that between the parties; in no latency.
    """

    party_bytes: float
    sent_bytes: float
    network_s: float


def dealt_keys(party_bytes: float, *, num_parties: int, bandwidth_bits_per_s: float) -> DealtKeys:
    return DealtKeys(
        party_bytes=party_bytes,
        sent_bytes=num_parties * party_bytes,
        network_s=party_bytes * 8 / bandwidth_bits_per_s,
    )


def keys_line(keys: DealtKeys) -> str:
    return (
        f"keys {format_bytes(keys.party_bytes)} a party for this run alone, from the dealer beforehand: "
        f"{format_bytes(keys.sent_bytes)} to send, {format_seconds(keys.network_s)} on the network, in no other number"
    )
