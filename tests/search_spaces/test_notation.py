from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.architecture import Architecture, Layer
from search_spaces.bases import BASES, Dimensions, base_architecture
from search_spaces.notation import FFN_NAMES, name_of, parse, placement
from search_spaces.space import load_space, members, sample

GPT2 = BASES["gpt2-small"]
LARGE = load_space("gpt2-small")
NORMS = st.sampled_from("Lo")
LETTERS = st.one_of(
    st.builds("".join, st.tuples(NORMS, st.sampled_from("ST"), NORMS, st.sampled_from("GRKIF"), st.sampled_from("so"))),
    st.builds(lambda norm, attention: f"{norm}{attention}ooo", NORMS, st.sampled_from("ST")),
)


def layers_of(name: str, base: Architecture = GPT2) -> tuple[Layer, ...]:
    return parse(name, base).architecture.layers


def test_paper_names_mean_what_the_papers_say() -> None:
    norms: Any = {"norm1": "layernorm", "norm2": "layernorm"}
    assert layers_of("SM+LN+G") == (Layer(ffn="gelu", **norms),) * 12
    assert layers_of("SM+LN") == (Layer(ffn="identity", **norms),) * 12
    assert layers_of("SM+R") == (Layer(ffn="relu"),) * 12
    assert layers_of("SM(t)+ScFFN") == (
        (Layer(attention="softmax-temperature", ffn="identity", stabiliser="scaled"),) * 12
    )
    assert layers_of("SM+ScFuFFN_i6") == (Layer(ffn="fused", stabiliser="scaled"),) * 6 + (Layer(ffn="none"),) * 6


def test_he_and_hofmann_keep_one_norm_at_the_input() -> None:
    architecture = parse("HH(SM+ScFFN)", GPT2).architecture
    assert (architecture.block, architecture.final_norm) == ("sas", "none")
    assert [layer.norm1 for layer in architecture.layers] == ["layernorm"] + ["none"] * 11


def test_entropy_regularisation_is_a_recipe() -> None:
    plain, regularised = parse("SM(t)+ScFuFFN", GPT2), parse("EReg(SM(t)+ScFuFFN)", GPT2)
    assert plain.architecture == regularised.architecture
    assert (plain.entropy_regularised, regularised.entropy_regularised) == (False, True)


@pytest.mark.parametrize("attention", ["SM", "SM(t)"])
@pytest.mark.parametrize("norm", ["", "+LN"])
@pytest.mark.parametrize("ffn", FFN_NAMES)
@pytest.mark.parametrize("wrapper", ["{}", "HH({})", "EReg({})", "EReg(HH({}))"])
def test_every_paper_name_prints_back(attention: str, norm: str, ffn: str, wrapper: str) -> None:
    for suffix in ("", "_i1", "_i11"):
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
def test_equal_models_have_one_name(text: str, printed: str) -> None:
    named = parse(text, GPT2)
    assert name_of(named.architecture, entropy_regularised=named.entropy_regularised) == printed
    assert parse(printed, GPT2) == named


@given(groups=st.lists(st.tuples(st.integers(1, 3), LETTERS), min_size=1, max_size=6), sas=st.booleans())
def test_any_placement_prints_back(groups: list[tuple[int, str]], sas: bool) -> None:
    text = "-".join(f"{count}x{letters}" for count, letters in groups)
    sized = base_architecture("tiny", Dimensions(layers=2 * sum(count for count, _ in groups)))
    named = parse(f"HH({text})" if sas else text, sized)
    assert parse(name_of(named.architecture), sized) == named
    assert parse(placement(named.architecture), sized).architecture.layers == named.architecture.layers
    assert not set(name_of(named.architecture)) & set(":/ ")


@pytest.mark.parametrize("forms", [Dimensions(softmax="2quad"), Dimensions(softmax="relu", gelu="piecewise")])
def test_a_name_keeps_the_forms_of_its_base(forms: Dimensions) -> None:
    """Forms are the base's, as dimensions are: names say placements only."""
    base = base_architecture("tiny", forms)
    named = parse("SM(t)+LN+G", base)
    assert (named.architecture.softmax, named.architecture.gelu) == (base.softmax, base.gelu)
    assert parse(name_of(named.architecture), base) == named


@pytest.mark.parametrize("name", ["ladder", "tiny"])
def test_every_member_of_the_shipped_spaces_prints_back(name: str) -> None:
    space = load_space(name)
    for member in members(space):
        text = name_of(member.architecture, entropy_regularised=member.entropy_regularised)
        assert parse(text, space.base) == member


@given(seed=st.integers(0, 2**32))
def test_members_of_the_large_space_print_back(seed: int) -> None:
    member = sample(LARGE, np.random.default_rng(seed))
    text = name_of(member.architecture, entropy_regularised=member.entropy_regularised)
    assert parse(text, LARGE.base) == member


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SM_i13", "`_i13` of 'SM_i13' removes more FFNs than there are layers (12); use a number from 0 to 12."),
        ("5xLSLGo", "placement '5xLSLGo' has groups of 5 layers, which do not tile the model's 12 layers; "),
        ("24xLSLGo", "placement '24xLSLGo' has groups of 24 layers, which do not tile the model's 12 layers; "),
        ("0xLSLGo-12xoSoGo", "placement '0xLSLGo-12xoSoGo' has groups of 0, 12 layers, which do not tile "),
        ("LSoGX", "letter 5 of 'LSoGX' in 'LSoGX' must be one of so, but got 'X'."),
        ("LSLoo", "a layer with ffn 'none' has nothing to normalise or scale, but got norm2='layernorm'"),
        ("", "architecture must be a name like SM+LN+G, "),
        ("sm+ln+g", "architecture must be a name like SM+LN+G, "),
        ("SM+LN+G ", "architecture must be a name like SM+LN+G, "),
        ("SM+G+LN", "architecture must be a name like SM+LN+G, "),
        ("EReg(EReg(SM))", "architecture must be a name like SM+LN+G, "),
        ("HH(EReg(SM))", "architecture must be a name like SM+LN+G, "),
        ("SM_i\u0661", "architecture must be a name like SM+LN+G, "),
        ("LSLGo--LSLGo", "architecture must be a name like SM+LN+G, "),
    ],
)
def test_what_is_not_a_name_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(text, GPT2)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "text", ["9999xLSLGo-" * 20_000 + "LSLGo", "EReg(" * 100_000, "-" * 1_000_000, "S" * 1_000_000]
)
def test_hostile_names_are_refused_in_a_short_line(text: str) -> None:
    """A repeat count is compared with the layers before it is expanded; expanding this one would fill the memory."""
    with pytest.raises(ValueError) as refused:
        parse(text, GPT2)
    assert len(str(refused.value)) < 400
