from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.architecture import Layer
from search_spaces.definition import SHIPPED, alphabet, load_definition
from search_spaces.space import load_space

CHOICES = """\
name: mine
base: tiny
choices:
  norm1: [none]
  attention: [softmax]
  norm2: [layernorm]
  ffn: [gelu, none]
  stabiliser: [scaled, none]
"""
MEMBERS = """\
name: mine
base: tiny
members: [SM+LN+G, SM+R]
"""


def test_every_shipped_file_is_listed():
    folder = Path(__file__).parents[2] / "search_spaces" / "spaces"
    assert sorted(path.stem for path in folder.glob("*.yaml")) == sorted(SHIPPED)


def test_what_is_removed_takes_its_norm_and_stabiliser_with_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(CHOICES)
    choices = load_definition(str(path)).choices
    assert choices is not None
    assert alphabet(choices) == [
        Layer(norm2="layernorm", ffn="gelu", stabiliser="scaled"),
        Layer(norm2="layernorm", ffn="gelu", stabiliser="none"),
        Layer(ffn="none"),
    ]
    without_attention = replace(choices, norm1=("layernorm", "none"), attention=("none",), ffn=("none",))
    assert alphabet(without_attention) == [Layer(attention="none", ffn="none")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CHOICES + "colour: red\n", "PATH has the unknown key 'colour'; known keys are name, base, dimensions, "),
        (
            CHOICES.replace("[gelu, none]", "[gelu, swish]"),
            "item 1 of `ffn` of `choices` of PATH must be one of gelu, ",
        ),
        (CHOICES.replace("[gelu, none]", "[]"), "`choices` of PATH: `ffn` must list at least one item, but is empty."),
        (CHOICES.replace("[gelu, none]", "[gelu, gelu]"), "`choices` of PATH: `ffn` must list each item on"),
        (CHOICES + "members: [SM]\n", "PATH: a space must have either `choices` or `members`, and not both."),
        ("name: mine\nbase: tiny\n", "PATH: a space must have either `choices` or `members`, and not both."),
        (CHOICES + "constraints: [fun]\n", "item 0 of `constraints` of PATH must be one of ffn-removed-only-in-"),
        (CHOICES + "entropy_regularisation: []\n", "PATH: `entropy_regularisation` must list at least one item, but "),
        (
            CHOICES + "entropy_regularisation: [1]\n",
            "item 0 of `entropy_regularisation` of PATH must be of type bool, ",
        ),
        (CHOICES + "dimensions: {depth: 3}\n", "`dimensions` of PATH has the unknown key 'depth'; known keys are "),
        (MEMBERS.replace("SM+R", "SM+Q"), "architecture must be a name like SM+LN+G, "),
        (MEMBERS.replace("SM+R", "EReg(SM+R)"), "member 'EReg(SM+R)' must be without EReg(...); "),
        (MEMBERS.replace("SM+R", "1xLSoGo-1xoSoGo-o"), "member '1xLSoGo-1xoSoGo-o' must have the final norm that its "),
        (MEMBERS.replace("SM+R", "HH(SM+R)"), "member 'HH(SM+R)' must keep the 'gpt2' block of its base"),
        (MEMBERS.replace("SM+R", "SM+LN+G"), "PATH: `members` must list each item once, but lists 'SM+LN+G' twice."),
        (MEMBERS.replace("[SM+LN+G, SM+R]", "[]"), "PATH: `members` must list at least one item, but is empty."),
        (MEMBERS + "constraints: [ffn-removed-only-in-deepest-suffix]\n", "PATH: `constraints` goes with `choices`"),
        (
            CHOICES + "withheld: {power8: [1, 1]}\n",
            "`withheld` of PATH: `withheld.power8` must list each item once, but ",
        ),
    ],
)
def test_bad_definitions_are_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        load_space(str(path))
    assert str(refused.value).startswith(message.replace("PATH", str(path)))
    assert "\n" not in str(refused.value)


def test_missing_file_and_unknown_name(tmp_path):
    with pytest.raises(ValueError, match=r"no\.yaml cannot be read: No such file or directory\."):
        load_space(str(tmp_path / "no.yaml"))
    with pytest.raises(ValueError, match=r"space must be one of gpt2-small, .*, tiny or the path of a \.yaml file"):
        load_space("gpt2")
