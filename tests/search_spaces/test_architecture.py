import re
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.estimate import estimate
from search_spaces.architecture import (
    Architecture,
    Layer,
    arch_id,
    default_final_norm,
    dump_architecture,
    is_live,
    load_architecture,
    reader_norms,
    scaled,
)
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.block import BLOCKS, BlockName
from search_spaces.deployed import deployed, deployed_id, regions
from search_spaces.forms import Attention, Ffn, Norm
from search_spaces.lower import lower
from search_spaces.notation import parse, parse_deployed, placement
from tests.search_spaces.conftest import drawn_layers

NORMS: st.SearchStrategy[Norm] = st.sampled_from(get_args(Norm))
LAYERS = drawn_layers(get_args(Norm), ("softmax", "softmax-temperature", "2quad", "bounded"), get_args(Ffn))


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    layers = tuple(draw(st.lists(LAYERS, min_size=1, max_size=5)))
    kv_heads, shared_by = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    num_heads = kv_heads * shared_by
    block: BlockName = draw(st.sampled_from(["gpt2", "pythia", "sas"]))
    return Architecture(
        block=block,
        num_heads=num_heads,
        num_kv_heads=kv_heads if shared_by > 1 and block != "sas" else None,
        head_size=None if block == "sas" else draw(st.sampled_from([None, 1, 6])),
        rotary_base=draw(st.sampled_from([1e4, 1e5])),
        norm_epsilon=draw(st.sampled_from([1e-6, 1e-5])),
        d_model=num_heads * draw(st.integers(1, 8)),
        d_ff=draw(st.integers(1, 64)),
        vocab_size=draw(st.integers(1, 1000)),
        context=draw(st.integers(1, 64)),
        final_norm=draw(NORMS),
        bias=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        gelu=draw(st.sampled_from(["tanh", "exact", "piecewise"])),
        softmax=draw(st.sampled_from(["exact", "2quad", "bounded"])),
        layers=layers,
    )


@given(architecture=architectures())
def test_yaml_gives_back_the_same_id(architecture, tmp_path_factory):
    path = tmp_path_factory.mktemp("yaml") / "a.yaml"
    path.write_text(dump_architecture(architecture))
    assert arch_id(load_architecture(path)) == arch_id(architecture)
    if any(layer.ffn == "gelu" for layer in architecture.layers):
        assert load_architecture(path) == architecture


@pytest.mark.parametrize(
    ("base", "name", "expected"),
    [
        ("gpt2-small", "SM+LN+G", "356fe2bdf4d1"),
        ("gpt2-small", "SM+ScFuFFN", "91c15643e024"),
        ("gpt2-small", "SM(t)+ScFuFFN_i6", "fadaa90ab111"),
        ("gpt2-small", "HH(SM+ScFuFFN)", "a3cc8e8dc667"),
        ("pythia-70m", "SM+LN+R", "7df190e7675c"),
        ("tiny", "oSoFs-LToGo", "1b816da00a2b"),
        ("smollm2-135m", "SM+RMS+SwiGLU", "06554d417526"),
    ],
)
def test_ids_never_change(base, name, expected):
    """Ledgers and folders key on them: a change here orphans every run on disk."""
    assert arch_id(parse(name, base_architecture(base)).architecture) == expected


def test_ids_ignore_the_form_of_a_gelu_that_is_not_there_and_an_exact_softmax():
    relu, gelu = (parse(name, BASES["tiny"]).architecture for name in ("SM+LN+R", "SM+LN+G"))
    assert arch_id(relu) == arch_id(replace(relu, gelu="exact"))
    assert arch_id(gelu) != arch_id(replace(gelu, gelu="exact"))
    others = [replace(gelu, softmax=form) for form in ("2quad", "relu")]
    assert "softmax: " not in dump_architecture(gelu)  # as in ids from before there were other forms
    assert "softmax: 2quad" in dump_architecture(others[0])
    assert len({arch_id(architecture) for architecture in (gelu, *others)}) == 3


@given(layers=st.lists(LAYERS, min_size=1, max_size=4).map(tuple))
def test_the_final_norm_is_the_highest_of_the_layers(layers):
    norms = {norm for layer in layers for norm in (layer.norm1, layer.norm2)}
    ranked = ("layernorm", "rmsnorm", "frozen-layernorm", "frozen-rmsnorm", "none")
    highest = next(norm for norm in ranked if norm in norms)
    readers = {norm for layer in layers for norm in reader_norms(layer)}
    if highest == "frozen-layernorm" and not readers <= {"frozen-layernorm"}:
        highest = "frozen-rmsnorm"  # its bias could not be folded
    assert default_final_norm(layers) == highest
    assert any(map(is_live, layers)) == (default_final_norm(layers) in ("layernorm", "rmsnorm"))


def test_dimensions_and_forms_override_those_of_the_base_and_keep_the_ffn_ratio():
    assert base_architecture("gpt2-small", Dimensions(d_model=384, heads=6)).d_ff == 1536
    assert base_architecture("gpt2-small", Dimensions(d_model=384, heads=6, d_ff=7)).d_ff == 7
    assert base_architecture("tiny", Dimensions(gelu="piecewise")) == replace(BASES["tiny"], gelu="piecewise")
    assert base_architecture("tiny", Dimensions(softmax="relu")) == replace(BASES["tiny"], softmax="relu")
    proxy = scaled(BASES["gpt2-small"], d_model=96, vocab_size=512, context=64)
    assert (proxy.d_model, proxy.d_ff, proxy.vocab_size, proxy.context, proxy.num_heads) == (96, 384, 512, 64, 12)
    assert proxy.layers == BASES["gpt2-small"].layers
    partly = replace(BASES["smollm2-135m"], rotary_features=48)
    sizes = {36: 2, 144: 12}  # 3/4 of a head of 4 and of 16 features, in pairs
    for d_model, rotated in sizes.items():
        assert scaled(partly, d_model=d_model, vocab_size=512, context=64).rotary_features == rotated


def sized(**dimensions):
    return lambda: base_architecture("gpt2-small", Dimensions(**dimensions))


def of_heads(attention):
    return lambda: replace(BASES["tiny"], block="sas", layers=(Layer(), Layer(attention=attention)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sized(heads=5), "`num_heads` must divide `d_model`, but got num_heads=5, d_model=768."),
        (sized(d_model=0), "`d_model` must be at least 1, but got 0."),
        (sized(layers=0), "`layers` must be from 1 to 500, but got 0."),
        (sized(layers=10**12), "`layers` must be from 1 to 500, but got 1000000000000."),
        (sized(vocab=-3), "`vocab_size` must be at least 1, but got -3."),
        (lambda: base_architecture("gpt5"), f"base must be one of {', '.join(BASES)}, but got 'gpt5'"),
        (lambda: Layer(ffn="none", norm2="layernorm"), "ffn 'none' has nothing to normalise or scale"),
        (lambda: Layer(ffn="none", stabiliser="scaled"), "ffn 'none' has nothing to normalise or scale"),
        (lambda: Layer(attention="none", norm1="rmsnorm"), "'none' has nothing to normalise, but got norm1='rmsnorm'"),
        (of_heads("none"), "block 'sas' passes the stream on through all its heads"),
        (of_heads("softmax-half"), "block 'sas' passes the stream on through all its heads"),
    ],
)
def test_impossible_architectures_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("block: gpt2", "block: gpt3"), "`block` of PATH must be one of gpt2, opt, pythia, neox, sas, llama, qwen2, "),
        (("d_ff: 64", "d_ff: 64\nwidth: 3"), "PATH has the unknown key 'width'; known keys are block, num_heads, "),
        (("num_heads: 2", "num_heads: 3"), "PATH: `num_heads` must divide `d_model`, but got num_heads=3, d_model=16."),
        (("bias: true", "softmax: quad"), "`softmax` of PATH must be one of exact, 2quad, power8, relu, bounded, but"),
        (("ffn: gelu", "ffn: swish"), "`ffn` of item 0 of `layers` of PATH must be one of gelu, gelu-exact, gelu-piec"),
    ],
)
def test_bad_yaml_is_refused_in_one_line(change, message, tmp_path):
    text = dump_architecture(BASES["tiny"])
    assert change[0] in text
    path = tmp_path / "a.yaml"
    path.write_text(text.replace(*change))
    with pytest.raises(ValueError) as refused:
        load_architecture(path)
    assert str(refused.value).startswith(message.replace("PATH", str(path)))
    assert "\n" not in str(refused.value)


GPT2 = BASES["gpt2-small"]
ALL_NORMS: tuple[Norm, ...] = ("layernorm", "rmsnorm", "frozen-layernorm", "frozen-rmsnorm", "none")
FFNS: tuple[Ffn, ...] = (
    "gelu", "gelu-exact", "gelu-piecewise", "relu", "square", "identity", "fused", "swiglu", "quadglu", "bilinear",
    "none",
)  # fmt: skip


def placed(text: str, block: BlockName = "gpt2") -> Architecture:
    """A placement of the tiny base, with as many layers as it says."""
    num_layers = sum(int(group.partition("x")[0]) for group in text.split("-") if "x" in group)
    base = replace(base_architecture("tiny", Dimensions(layers=num_layers)), block=block)
    return parse(text, base).architecture


def deployed_placement(text: str, block: BlockName = "gpt2") -> str:
    return placement(deployed(placed(text, block)))


def layers(block: BlockName) -> st.SearchStrategy[Layer]:
    removable: tuple[Attention, ...] = ("none", "softmax-half") if block != "sas" else ()
    return drawn_layers(norms_of(block), ("softmax", "softmax-temperature", "2quad", "bounded", *removable), FFNS)


def norms_of(block: BlockName) -> tuple[Norm, ...]:
    return ALL_NORMS if BLOCKS[block].has_centred_norms else ("rmsnorm", "frozen-rmsnorm", "none")


@st.composite
def tiny_architectures(draw: st.DrawFn) -> Architecture:
    """Tiny, of one to four layers, with any final norm."""
    block = draw(st.sampled_from(sorted(BLOCKS)))
    drawn = tuple(draw(st.lists(layers(block), min_size=1, max_size=4)))
    forms: Any = {
        "gelu": draw(st.sampled_from(["tanh", "exact"])),
        "softmax": draw(st.sampled_from(["exact", "2quad"])),
    }
    final_norm = draw(st.sampled_from(norms_of(block)))
    bias = BLOCKS[block].has_centred_norms or draw(st.booleans())
    return replace(BASES["tiny"], block=block, layers=drawn, final_norm=final_norm, bias=bias, **forms)


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
    assert [(region.ahead, region.behind) for region in regions(placed(text))] == expected


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
    # an FFN beside attention is not one behind it: in one layer of `pythia` it would read X, in two it reads A
    assert deployed_placement("1xoSooo-1xooLGs", "pythia") == "1xoSooo-1xooLGs"


@pytest.mark.parametrize("name", ["SM+ScFuFFN", "SM+ScFuFFN_i9", "SM+ScFFN", "SM_i12", "SM", "SM+fLN", "SM+fRMS_i3"])
def test_without_a_live_norm_linear_ffns_leave_attention_alone(name):
    """Nothing reads the stream but linears, which take up every `beta X + W X + c` as a change of basis."""
    form = deployed(parse(name, GPT2).architecture)
    assert placement(form) == "12xoSooo"
    assert (form.final_norm, form.folded, form.bias, form.tied_embeddings) == ("none", True, True, False)


def test_simplified_blocks_absorb_no_ffn():
    """Heads pass on slices of the stream, which only a multiple of the identity leaves alone."""
    form = deployed(parse("HH(SM+ScFFN)", GPT2).architecture)
    assert placement(form) == "1xLSoFo-11xoSoFo"
    assert form == deployed(parse("HH(SM+ScFuFFN)", GPT2).architecture)
    assert deployed_placement("1xLSoFs-1xoSoFs-1xLSoFs-1xoSoFs", "sas") == "1xLSoFo-1xoSoFo-1xLSoFs-1xoSoFs"


def test_a_form_that_is_the_architectures_own_and_half_of_one_head_have_one_name():
    base = replace(BASES["tiny"], softmax="2quad", gelu="exact")
    own_form, base_form = (deployed(parse(text, base).architecture) for text in ("LQLEo", "LSLGo"))
    assert own_form == base_form
    assert placement(deployed(parse("LULPo", base).architecture)) == "2xLULPo"
    assert placement(deployed(parse("LQLEo", BASES["tiny"]).architecture)) == "2xLQLEo"
    one_head = base_architecture("tiny", Dimensions(heads=1))
    assert placement(deployed(parse("LHLGo", one_head).architecture)) == "2xLSLGo"
    assert placement(deployed(parse("LHLGo", BASES["tiny"]).architecture)) == "2xLHLGo"


@given(architecture=tiny_architectures())
def test_deploying_twice_changes_nothing_and_a_deployed_architecture_prints_back(architecture):
    """Nor does folding again what is left, taken as trained anew; what is folded is what is run, even in part."""
    form = deployed(architecture)
    assert deployed(form) == form
    assert deployed(folded := replace(architecture, folded=True)) is folded
    assert deployed(replace(form, folded=False)) == form
    assert parse_deployed(placement(form), architecture) == form


@given(architecture=tiny_architectures(), seq_len=st.integers(1, 9))
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
