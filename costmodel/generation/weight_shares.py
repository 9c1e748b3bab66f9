"""The server shares its weights with the other parties, each share with the one whose it is."""

from collections.abc import Iterable
from typing import Any

from costmodel.engine.programs import operand_visibility
from costmodel.engine.runtimes import SERVER, dealt, owner_of_weights, packed, unpacked
from costmodel.execution.interpreter import Weights
from costmodel.generation.operands import Operand
from costmodel.generation.peers import Peers
from costmodel.protocols.primitives import EngineSetting


def deal_weights(
    peers: Peers, found: Iterable[Operand], weights: Weights, protocol: str, setting: EngineSetting
) -> dict[str, Any]:
    """Sends every party its shares; the server's own by variable.

    Raises UserError for a weight that is missing or of another shape.
    """
    own, owner = {}, owner_of_weights(setting)
    for operand in found:
        shares = dealt(protocol, setting, operand.of(weights), operand_visibility(operand.node.op), owner)
        own[operand.variable] = shares[SERVER]
        for peer in peers:
            peers.send(peer, {"kind": "share", "name": operand.variable}, packed(shares[peer]))
    peers.send_all({"kind": "shared"})
    return own


def received_weights(peers: Peers) -> dict[str, Any]:
    """Another party's shares by variable."""
    found = {}
    while (frame := peers.receive(SERVER)).header["kind"] == "share":
        found[frame.header["name"]] = unpacked(frame.blobs)
    return found
