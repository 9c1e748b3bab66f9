"""What is said below a table of perplexities in fixed point."""

import json
import math

import numpy as np
import pytest

from costmodel.engine.agreement import Agreement
from costmodel.network import load_network
from costmodel.protocols.primitives import EngineSetting
from nas.corpus.documents import GivenTokenizer
from nas.private.fixed_point import Scored, fixed_point_document, gelu_lines
from nas.private.model import PrivateModel
from nas.private.setup import Setup
from search_spaces.bases import base_architecture
from search_spaces.notation import parse


@pytest.fixture
def setup_of(tokenizer: GivenTokenizer):
    """Makes the set-up of an untrained model by its name."""

    def make(name: str) -> Setup:
        architecture = parse(name, base_architecture("tiny")).architecture
        model = PrivateModel(name=name, architecture=architecture, weights=None, tokenizer=tokenizer, corpus=None)
        return Setup(model=model, protocol="semi2k", setting=EngineSetting(), network=load_network("loopback"))

    return make


@pytest.mark.parametrize(("name", "is_said"), [("SM+LN+G", True), ("SM+LN+R", False), ("1xlSlEo-1xlSlGo", True)])
def test_what_the_engine_makes_of_tanh_is_said_where_there_is_one(name, is_said, setup_of):
    lines = gelu_lines(setup_of(name))
    assert [line for line in lines if "--gelu exact" in line] == lines
    assert bool(lines) == is_said


def test_a_perplexity_that_overflowed_is_null(setup_of):
    agreement = Agreement(num_positions=1, num_equal=0, largest_error=1.0)
    scored = Scored(
        setting=EngineSetting(),
        perplexity=math.inf,
        agreement=agreement,
        sent_bytes=1,
        seconds=1.0,
        predicted_bytes=1,
        predicted_s=None,
    )
    document = fixed_point_document(setup_of("SM+LN+R"), math.inf, [scored], np.zeros((1, 9), dtype=np.uint16))
    assert document["clear_perplexity"] is document["arithmetics"][0]["perplexity"] is None
    json.dumps(document, allow_nan=False)
