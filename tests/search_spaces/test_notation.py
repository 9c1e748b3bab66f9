from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.architecture import Architecture, Layer
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.notation import (
    FFN_NAMES,
    NORM_NAMES,
    name_of,
    parse,
    parse_deployed,
    placement,
)

GPT2 = BASES["gpt2-small"]
NORMS = st.sampled_from("LMlmo")
ATTENTIONS = st.one_of(st.builds("".join, st.tuples(NORMS, st.sampled_from("STHQUB"))), st.just("oo"))
FFNS = st.one_of(
    st.builds("".join, st.tuples(NORMS, st.sampled_from("GEPRKXIFWVB"), st.sampled_from("so"))), st.just("ooo")
)
LETTERS = st.builds("".join, st.tuples(ATTENTIONS, FFNS))
SIMPLIFIED = LETTERS.filter(lambda letters: letters[1] not in "oH")  # `sas` passes the stream on through its heads


def layers_of(name: str, base: Architecture = GPT2) -> tuple[Layer, ...]:
    return parse(name, base).architecture.layers


def test_paper_names_mean_what_the_papers_say():
    norms: Any = {"norm1": "layernorm", "norm2": "layernorm"}
    assert layers_of("SM+LN+G") == (Layer(ffn="gelu", **norms),) * 12
    assert layers_of("SM+LN") == (Layer(ffn="identity", **norms),) * 12
    assert layers_of("SM+R") == (Layer(ffn="relu"),) * 12
    assert layers_of("SM+RMS+SQ") == (Layer(norm1="rmsnorm", norm2="rmsnorm", ffn="square"),) * 12
    frozen = (Layer(norm1="frozen-layernorm", norm2="frozen-layernorm", ffn="relu"),)
    assert layers_of("SM+fLN+R_i11") == frozen + (Layer(norm1="frozen-layernorm", ffn="none"),) * 11
    tempered: Any = {"attention": "softmax-temperature", "ffn": "identity"}
    assert layers_of("SM(t)+fRMS") == (Layer(norm1="frozen-rmsnorm", norm2="frozen-rmsnorm", **tempered),) * 12
    assert layers_of("SM(t)+ScFFN") == (Layer(stabiliser="scaled", **tempered),) * 12
    norms = {"norm1": "frozen-rmsnorm", "norm2": "frozen-layernorm"}
    assert layers_of("mHlXs") == (Layer(attention="softmax-half", ffn="square", stabiliser="scaled", **norms),) * 12
    assert layers_of("SM+ScFuFFN_i6") == (Layer(ffn="fused", stabiliser="scaled"),) * 6 + (Layer(ffn="none"),) * 6


def test_he_and_hofmann_keep_one_norm_and_entropy_regularisation_is_a_recipe():
    architecture = parse("HH(SM+ScFFN)", GPT2).architecture
    assert (architecture.block, architecture.final_norm) == ("sas", "none")
    assert [layer.norm1 for layer in architecture.layers] == ["layernorm"] + ["none"] * 11
    plain, regularised = parse("SM(t)+ScFuFFN", GPT2), parse("EReg(SM(t)+ScFuFFN)", GPT2)
    assert plain.architecture == regularised.architecture
    assert (plain.entropy_regularised, regularised.entropy_regularised) == (False, True)


@pytest.mark.parametrize("norm", NORM_NAMES)
@pytest.mark.parametrize("ffn", FFN_NAMES)
def test_every_paper_name_prints_back(norm, ffn):
    wrappers = ("{}", "HH({})", "EReg({})", "EReg(HH({}))")
    for attention, wrapper, suffix in product(("SM", "SM(t)"), wrappers, ("", "_i1", "_i11")):
        text = wrapper.format(f"{attention}{norm}{ffn}{suffix}")
        named = parse(text, GPT2)
        assert name_of(named.architecture, entropy_regularised=named.entropy_regularised) == text


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("SM+LN+G_i0", "SM+LN+G"),
        ("SM+LN+G_i12", "SM+LN_i12"),
        ("SM+ScFuFFN_i12", "SM_i12"),
        ("HH(SM+ScFFN_i12)", "HH(SM_i12)"),
        ("oSoGo", "SM+G"),
        ("6xLSLGo-6xoSoFs", "6xLSLGo-6xoSoFs"),
        ("LSLGo-oSoFs", "1xLSLGo-1xoSoFs-" * 5 + "1xLSLGo-1xoSoFs"),
        ("EReg(HH(6xLSLGo-6xoSoFs))", "EReg(HH(6xLSLGo-6xoSoFs))"),
    ],
)
def test_equal_models_have_one_name(text, printed):
    named = parse(text, GPT2)
    assert name_of(named.architecture, entropy_regularised=named.entropy_regularised) == printed
    assert parse(printed, GPT2) == named


@given(data=st.data(), final_norm=st.sampled_from(["", "-L", "-M", "-l", "-m", "-o"]), sas=st.booleans())
def test_any_placement_prints_back(data, final_norm, sas):
    letters = st.tuples(st.integers(1, 3), SIMPLIFIED if sas else LETTERS)
    groups = data.draw(st.lists(letters, min_size=1, max_size=6))
    text = "-".join(f"{count}x{letters}" for count, letters in groups) + final_norm
    sized = base_architecture("tiny", Dimensions(layers=2 * sum(count for count, _ in groups)))
    named = parse(f"HH({text})" if sas else text, sized)
    assert parse(name_of(named.architecture), sized) == named
    assert parse(placement(named.architecture), replace(sized, block=named.architecture.block)) == named
    assert not set(name_of(named.architecture)) & set(":/ ")


@pytest.mark.parametrize(
    ("text", "final_norm", "printed"),
    [
        ("12xLSLGo", "layernorm", "SM+LN+G"),  # the layers imply it
        ("12xLSLGo-L", "layernorm", "SM+LN+G"),
        ("12xLSLGo-o", "none", "12xLSLGo-o"),
        ("12xoSoRo-l", "frozen-layernorm", "12xoSoRo-l"),
        ("6xmSoRo-6xlSoRo", "frozen-rmsnorm", "6xmSoRo-6xlSoRo"),  # not every reader is centred
        ("6xlSlRo-6xLSooo", "layernorm", "6xlSlRo-6xLSooo"),  # of highest rank
        ("6xlSoRo-6xMSoRo", "rmsnorm", "6xlSoRo-6xMSoRo"),
        ("HH(12xLSoRo)", "none", "HH(12xLSoRo)"),
        ("HH(12xLSoRo-M)", "rmsnorm", "HH(12xLSoRo-M)"),
        ("SM+LN+G-o", "none", "12xLSLGo-o"),
        ("SM+RMS+R-m", "frozen-rmsnorm", "12xMSMRo-m"),
    ],
)
def test_the_final_norm_is_stated_where_the_layers_do_not_imply_it(text, final_norm, printed):
    architecture = parse(text, GPT2).architecture
    assert (architecture.final_norm, name_of(architecture)) == (final_norm, printed)


@pytest.mark.parametrize("block", ["gpt2", "pythia", "sas"])
@given(data=st.data())
def test_a_deployed_placement_says_how_many_layers_it_has(block, data):
    letters = data.draw(st.lists(SIMPLIFIED if block == "sas" else LETTERS, min_size=1, max_size=5))
    base = replace(BASES["tiny"], block=block)
    form = parse_deployed("-".join(letters), base)
    assert (form.num_layers, form.folded, form.bias, form.tied_embeddings) == (len(letters), True, True, False)
    assert parse_deployed(placement(form), base_of(form, 7)) == form


def base_of(architecture: Architecture, num_layers: int) -> Architecture:
    return replace(architecture, layers=BASES["tiny"].layers[:1] * num_layers, folded=False)


@pytest.mark.parametrize("forms", [Dimensions(softmax="2quad"), Dimensions(softmax="relu", gelu="piecewise")])
def test_a_name_keeps_the_forms_of_its_base(forms):
    base = base_architecture("tiny", forms)
    named = parse("SM(t)+LN+G", base)
    assert (named.architecture.softmax, named.architecture.gelu) == (base.softmax, base.gelu)
    assert parse(name_of(named.architecture), base) == named


NO_NAMES = ["LSLGo-X", "-L", "LSLGo-L-L", "SM+fln+R", "", "sm+ln+g", "SM+LN+G ", "SM+G+LN", "EReg(EReg(SM))"]
NO_NAMES += ["HH(EReg(SM))", "SM_i\u0661", "LSLGo--LSLGo"]
# a repeat count is compared with the layers before it is expanded: expanding this one would fill the memory
HOSTILE = ["9999xLSLGo-" * 20_000 + "LSLGo", "EReg(" * 100_000, "-" * 1_000_000, "S" * 1_000_000]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SM_i13", "`_i13` of 'SM_i13' removes more FFNs than there are layers (12); use a number from 0 to 12."),
        ("5xLSLGo", "placement '5xLSLGo' has groups of 5 layers, which do not tile the model's 12 layers; "),
        ("24xLSLGo", "placement '24xLSLGo' has groups of 24 layers, which do not tile the model's 12 layers; "),
        ("0xLSLGo-12xoSoGo", "placement '0xLSLGo-12xoSoGo' has groups of 0, 12 layers, which do not tile "),
        ("LSoGX", "letter 5 of 'LSoGX' in 'LSoGX' must be one of so, but got 'X'."),
        ("LSLoo", "a layer with ffn 'none' has nothing to normalise or scale, but got norm2='layernorm'"),
        ("LooGo", "a layer with attention 'none' has nothing to normalise, but got norm1='layernorm'; "),
        ("LSLGofo", "`inner1` of a layer must be one of own, since block 'gpt2' has no other norms or caps to change"),
        ("HH(oSoGo-oooGo)", "block 'sas' passes the stream on through all its heads, so no layer of it can have "),
        ("HH(oHoGo)", "block 'sas' passes the stream on through all its heads, so no layer of it can have "),
        *((text, "architecture must be a name like SM+LN+G, ") for text in NO_NAMES),
        *((text, "") for text in HOSTILE),
    ],
    ids=lambda text: text[:30],
)
def test_what_is_not_a_name_is_refused(text, message):
    with pytest.raises(ValueError) as refused:
        parse(text, GPT2)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value)) < 400


def test_what_is_not_a_placement_has_no_number_of_layers():
    for text in ("SM+LN+G", "", "-L", "0xLSLGo", "HH(LSoGo-oSoGo)"):
        with pytest.raises(ValueError, match="a folded architecture must be a placement like 6xLSLGo-6xoSoFs, but"):
            parse_deployed(text, BASES["tiny"])
