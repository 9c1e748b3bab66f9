from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.estimate import estimate
from search_spaces.architecture import Architecture, Attention, Ffn, Layer, Norm, arch_id
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.block import BLOCKS, BlockName
from search_spaces.deployed import deployed, deployed_id, regions
from search_spaces.lower import lower
from search_spaces.notation import parse, parse_deployed, placement
from tests.search_spaces.conftest import drawn_layers

GPT2 = BASES["gpt2-small"]
NORMS: tuple[Norm, ...] = ("layernorm", "rmsnorm", "frozen-layernorm", "frozen-rmsnorm", "none")
FFNS: tuple[Ffn, ...] = (
    "gelu", "gelu-exact", "gelu-piecewise", "relu", "square", "identity", "fused", "swiglu", "quadglu", "bilinear",
    "none",
)  # fmt: skip


def sized(text: str, block: BlockName = "gpt2") -> Architecture:
    """A placement of the tiny base, with as many layers as it says."""
    num_layers = sum(int(group.partition("x")[0]) for group in text.split("-") if "x" in group)
    base = replace(base_architecture("tiny", Dimensions(layers=num_layers)), block=block)
    return parse(text, base).architecture


def deployed_placement(text: str, block: BlockName = "gpt2") -> str:
    return placement(deployed(sized(text, block)))


def layers(block: BlockName) -> st.SearchStrategy[Layer]:
    removable: tuple[Attention, ...] = ("none", "softmax-half") if block != "sas" else ()
    return drawn_layers(norms_of(block), ("softmax", "softmax-temperature", "2quad", "bounded", *removable), FFNS)


def norms_of(block: BlockName) -> tuple[Norm, ...]:
    return NORMS if BLOCKS[block].has_centred_norms else ("rmsnorm", "frozen-rmsnorm", "none")


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Tiny, of one to four layers, with any final norm."""
    block = draw(st.sampled_from(sorted(BLOCKS)))
    placed = tuple(draw(st.lists(layers(block), min_size=1, max_size=4)))
    forms: Any = {
        "gelu": draw(st.sampled_from(["tanh", "exact"])),
        "softmax": draw(st.sampled_from(["exact", "2quad"])),
    }
    final_norm = draw(st.sampled_from(norms_of(block)))
    bias = BLOCKS[block].has_centred_norms or draw(st.booleans())
    return replace(BASES["tiny"], block=block, layers=placed, final_norm=final_norm, bias=bias, **forms)


# text, what it deploys to, and for each layer whether the stream's basis is free ahead of its FFN and behind it
REGIONS = {
    # The embedding takes up layer 0's change of basis. Layer 1's LayerNorm reads the stream ahead of layer 1's FFN, and
    # the final LayerNorm the stream behind both, so that neither basis is free there.
    "1xoSoFs-1xLSoFs-1xoSoFs": ("1xoSooo-1xLSoFs-1xoSoFs", [(True, False), (False, False), (False, False)]),
    # The vocabulary projection takes up the change of basis behind layer 0's norm1, and so layer 0's own FFN goes, as
    # layer 1's, and layer 2's beta.
    "1xLSoFs-1xoSoFs-1xoSoRs-m": ("1xLSooo-1xoSooo-1xoSoRo-o", [(False, True)] * 3),
    # Between two live norms nothing is free.
    "1xLSoFs-1xoSoFs-1xMSoFs-o": ("1xLSoFs-1xoSoFs-1xMSooo-o", [(False, False), (False, False), (False, True)]),
}


@pytest.mark.parametrize("text", REGIONS)
def test_ffns_vanish_where_the_basis_of_the_stream_is_free(text):
    form, expected = REGIONS[text]
    assert deployed_placement(text) == form
    assert [(region.ahead, region.behind) for region in regions(sized(text))] == expected


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("1xoSLFs-o", "1xoSLFo-o"),  # norm2 is read by the FFN itself, which stays even as the last of the net
        ("1xoSLFs", "1xoSLFs"),
        ("3xLSLIo", "3xLSLFo"),  # behind live norms two linears are one, and none is a change of the stream's basis
        ("3xooooo", "1xooooo"),  # layers that compute nothing leave one
        ("3xooooo-l", "1xooooo"),
        ("3xooooo-L", "1xooooo-L"),
        ("1xooooo-1xoSoGo-1xoolFs", "1xoSoGo"),  # its FFN goes: nothing live reads it
        ("3xlSlRo", "3xoSoRo"),  # a frozen norm is linear, and goes into the linears that read it
        ("3xmSmRo", "3xoSoRo"),
        ("1xoSooo-1xooLGs", "1xoSLGs"),  # A = X + MHA(X), then Y = A + FFN(Norm(A)), in one layer or two
        ("1xooLGs-1xoSooo", "1xooLGs-1xoSooo"),
        ("1xLSooo-1xooooo-1xooLGs-1xooLGs", "1xLSLGs-1xooLGs"),
    ],
)
def test_what_is_left_of_a_placement(text, form):
    assert deployed_placement(text) == form


def test_an_ffn_beside_attention_is_not_one_behind_it():
    """In one layer of `pythia` the FFN would read X, in two it reads A."""
    assert deployed_placement("1xoSooo-1xooLGs", "pythia") == "1xoSooo-1xooLGs"


@pytest.mark.parametrize("name", ["SM+ScFuFFN", "SM+ScFuFFN_i9", "SM+ScFFN", "SM_i12", "SM", "SM+fLN", "SM+fRMS_i3"])
def test_without_a_live_norm_linear_ffns_leave_attention_alone(name):
    """Nothing reads the stream but linears, from the embedding to the head: every `beta X + W X + c` is a change of
    basis, which embedding, attention's linears and vocabulary projection take up, each FFN removed or not."""
    form = deployed(parse(name, GPT2).architecture)
    assert placement(form) == "12xoSooo"
    assert (form.final_norm, form.folded, form.bias, form.tied_embeddings) == ("none", True, True, False)


def test_simplified_blocks_absorb_no_ffn():
    """Heads pass on slices of the stream, which only a multiple of the identity leaves alone: so beta goes ahead of
    the first norm that reads the stream. That of layer 0 makes it."""
    form = deployed(parse("HH(SM+ScFFN)", GPT2).architecture)
    assert placement(form) == "1xLSoFo-11xoSoFo"
    assert form == deployed(parse("HH(SM+ScFuFFN)", GPT2).architecture)
    assert deployed_placement("1xLSoFs-1xoSoFs-1xLSoFs-1xoSoFs", "sas") == "1xLSoFo-1xoSoFo-1xLSoFs-1xoSoFs"


def test_a_form_that_is_the_architectures_own_has_one_name():
    base = replace(BASES["tiny"], softmax="2quad", gelu="exact")
    own_form, base_form = (deployed(parse(text, base).architecture) for text in ("LQLEo", "LSLGo"))
    assert own_form == base_form
    assert placement(deployed(parse("LULPo", base).architecture)) == "2xLULPo"
    assert placement(deployed(parse("LQLEo", BASES["tiny"]).architecture)) == "2xLQLEo"


def test_half_of_one_head_is_that_head():
    one_head = base_architecture("tiny", Dimensions(heads=1))
    assert placement(deployed(parse("LHLGo", one_head).architecture)) == "2xLSLGo"
    assert placement(deployed(parse("LHLGo", BASES["tiny"]).architecture)) == "2xLHLGo"


def test_a_folded_architecture_is_its_own_deployed_form():
    """Folding may leave what it cannot take up without loss, so what is folded is what is run."""
    folded = replace(sized("2xoSoFs"), folded=True)
    assert deployed(folded) is folded


@given(architecture=architectures())
def test_deploying_twice_changes_nothing(architecture):
    """Nor does folding again what is left, taken as trained anew."""
    form = deployed(architecture)
    assert deployed(form) == form
    assert deployed(replace(form, folded=False)) == form


@given(architecture=architectures())
def test_a_deployed_architecture_prints_back(architecture):
    form = deployed(architecture)
    assert parse_deployed(placement(form), architecture) == form


@given(architecture=architectures(), seq_len=st.integers(1, 9))
def test_deployed_costs_no_more_than_written(sizes, architecture, seq_len):
    written, left = (estimate(lower(form, seq_len), sizes).total for form in (architecture, deployed(architecture)))
    assert left.latency_s <= written.latency_s
    assert left.sent_bytes <= written.sent_bytes


@given(block=st.sampled_from(sorted(BLOCKS)), data=st.data())
def test_ids_are_equal_iff_deployed_forms_are(block, data):
    alphabet = data.draw(st.lists(layers(block), min_size=2, max_size=6, unique=True))
    forms = [
        deployed(replace(BASES["tiny"], block=block, layers=word, final_norm=norm))
        for word in product(alphabet, repeat=2)
        for norm in (norms_of(block)[0], "frozen-rmsnorm", "none")
    ]
    assert len({*forms}) == len({arch_id(form) for form in forms}) == len({(arch_id(form), form) for form in forms})
    assert len({*forms}) < len(forms)  # a frozen final norm is none
    assert deployed_id(forms[0]) == arch_id(forms[0])
