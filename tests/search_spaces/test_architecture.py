import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from search_spaces.block import BlockName
from search_spaces.forms import Ffn, Norm
from search_spaces.notation import parse
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


def test_id_ignores_the_gelu_form_only_where_there_is_no_gelu():
    relu, gelu = (parse(name, BASES["tiny"]).architecture for name in ("SM+LN+R", "SM+LN+G"))
    assert arch_id(relu) == arch_id(replace(relu, gelu="exact"))
    assert arch_id(gelu) != arch_id(replace(gelu, gelu="exact"))


def test_an_exact_softmax_is_left_out_and_any_other_is_not():
    """Ids from before there were other forms stay as they are."""
    exact = BASES["tiny"]
    assert "softmax: " not in dump_architecture(exact)
    others = [replace(exact, softmax=form) for form in ("2quad", "relu")]
    assert "softmax: 2quad" in dump_architecture(others[0])
    assert len({arch_id(architecture) for architecture in (exact, *others)}) == 3


@given(first=architectures(), second=architectures())
def test_different_architectures_have_different_ids(first, second):
    assert (arch_id(first) == arch_id(second)) == (dump_architecture(first) == dump_architecture(second))


@given(layers=st.lists(LAYERS, min_size=1, max_size=4).map(tuple))
def test_the_final_norm_is_the_highest_of_the_layers(layers):
    """LayerNorm above RMSNorm, either above those that are frozen, any above none."""
    norms = {norm for layer in layers for norm in (layer.norm1, layer.norm2)}
    ranked = ("layernorm", "rmsnorm", "frozen-layernorm", "frozen-rmsnorm", "none")
    highest = next(norm for norm in ranked if norm in norms)
    readers = {norm for layer in layers for norm in reader_norms(layer)}
    if highest == "frozen-layernorm" and not readers <= {"frozen-layernorm"}:
        highest = "frozen-rmsnorm"  # its bias could not be folded
    assert default_final_norm(layers) == highest
    assert any(map(is_live, layers)) == (default_final_norm(layers) in ("layernorm", "rmsnorm"))


def test_scaled_keeps_placement_and_ffn_ratio():
    proxy = scaled(BASES["gpt2-small"], d_model=96, vocab_size=512, context=64)
    assert (proxy.d_model, proxy.d_ff, proxy.vocab_size, proxy.context, proxy.num_heads) == (96, 384, 512, 64, 12)
    assert proxy.layers == BASES["gpt2-small"].layers


def test_dimensions_and_forms_override_those_of_the_base_and_keep_the_ffn_ratio():
    assert base_architecture("gpt2-small", Dimensions(d_model=384, heads=6)).d_ff == 1536
    assert base_architecture("gpt2-small", Dimensions(d_model=384, heads=6, d_ff=7)).d_ff == 7
    assert base_architecture("tiny", Dimensions(gelu="piecewise")) == replace(BASES["tiny"], gelu="piecewise")
    assert base_architecture("tiny", Dimensions(softmax="relu")) == replace(BASES["tiny"], softmax="relu")


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
        (
            ("bias: true", "softmax: quad"),
            "`softmax` of PATH must be one of exact, 2quad, power8, relu, bounded, but got 'quad'.",
        ),
        (
            ("ffn: gelu", "ffn: swish"),
            "`ffn` of item 0 of `layers` of PATH must be one of gelu, gelu-exact, gelu-piecewise, ",
        ),
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
