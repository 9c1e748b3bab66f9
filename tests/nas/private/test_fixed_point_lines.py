"""What is said below a table of perplexities in fixed point."""

import pytest

from costmodel.network import load_network
from costmodel.protocols.primitives import EngineSetting
from nas.corpus.documents import GivenTokenizer
from nas.private.deployed import Deployed
from nas.private.fixed_point_lines import gelu_lines
from nas.private.setup import Setup
from search_spaces.bases import base_architecture
from search_spaces.notation import parse


@pytest.mark.parametrize(("name", "is_said"), [("SM+LN+G", True), ("SM+LN+R", False), ("1xlSlEo-1xlSlGo", True)])
def test_what_the_engine_makes_of_tanh_is_said_where_there_is_one(name, is_said, tokenizer: GivenTokenizer):
    model = Deployed(
        name=name,
        architecture=parse(name, base_architecture("tiny")).architecture,
        weights=None,
        tokenizer=tokenizer,
        corpus=None,
    )
    setup = Setup(model=model, protocol="semi2k", setting=EngineSetting(), network=load_network("loopback"))
    assert [line for line in gelu_lines(setup) if "--gelu exact" in line] == gelu_lines(setup)
    assert bool(gelu_lines(setup)) == is_said
