from functools import partial

import numpy as np
import pytest

from costmodel.engine.compare import drawn_weights
from costmodel.engine.plan import Assignment, Plan
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

BASE = base_architecture("gpt2-small", Dimensions(layers=2, heads=2, d_model=16, vocab=50, context=16))


@pytest.fixture(scope="session")
def decoder():
    """The op graph, by tokens and deployment, of a small decoder with norms, temperatures and both kinds of layer."""
    return partial(lower, parse("1xLTLKs-1xoSoRo", BASE).architecture)


@pytest.fixture(scope="session")
def weights(decoder):
    """Weights for the whole context."""
    return drawn_weights(decoder(16), np.random.default_rng(0))


@pytest.fixture
def client(decoder, weights):
    """`client("aby3", num_new=3)`: the assignment of a client that knows everything, with a prompt of 5 tokens."""

    def make(protocol: str, *, num_new: int = 3, **setting) -> Assignment:
        return Assignment(
            protocol=protocol,
            setting=ENGINE_PROTOCOLS[protocol].setting(**setting),
            graph_of=decoder,
            plan=Plan(kind="tokens", num_tokens=5, num_new=num_new),
            weights=weights,
        )

    return make
