"""Who holds which weights in the clear where some layers are public; their costs are in protocols/test_variants.py."""

import numpy as np
import pytest

from costmodel.deployment.deploy import Deployment
from costmodel.engine.compare import drawn_weights
from costmodel.engine.programs import operand_visibility, operands
from costmodel.engine.runtimes import SERVER, make_shares, owner_of_weights, packed
from costmodel.ops import Temperature
from costmodel.protocols.primitives import EngineSetting

PUBLIC = Deployment(public_layers="embed,1")


@pytest.mark.needs_engine
@pytest.mark.parametrize("weights", ["secret", "server"])
@pytest.mark.parametrize("protocol", ["semi2k", "aby3", "cheetah"])
def test_parties_hold_the_weights_of_public_layers_and_of_no_other(protocol, weights, decoder):
    """A party has a weight in the clear if its share contains the numbers as the engine encodes them."""
    graph, setting = decoder(5, PUBLIC), EngineSetting(weights=weights)
    drawn = drawn_weights(graph, np.random.default_rng(0))
    for operand in operands([graph]):
        values = operand.of(drawn)
        shares = make_shares(protocol, setting, values, operand_visibility(operand.node.op), owner_of_weights(setting))
        encoded = (np.float32(values) * 2**setting.fraction_bits).astype(np.int64).tobytes()
        holders = {rank for rank, share in enumerate(shares) if encoded in b"".join(packed(share))}
        is_public = operand.node.layer in ("embed", 1) or isinstance(operand.node.op, Temperature)
        others = {SERVER} if weights == "server" else set()
        assert holders == (set(range(len(shares))) if is_public else others), operand.variable
