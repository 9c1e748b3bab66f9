from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from search_spaces.architecture import Layer, arch_id
from search_spaces.graph import Choice
from search_spaces.notation import Member, name_of, parse
from search_spaces.space import (
    SHIPPED,
    Definition,
    Withheld,
    alphabet,
    build_space,
    contains,
    load_definition,
    load_space,
    member_at,
    members,
    num_architectures,
    num_members,
    path_of,
    random_below,
    sample,
    with_first_layers,
    without,
)
from search_spaces.variation import crossover, mutate
from tests.conftest import python


@pytest.mark.parametrize(
    ("name", "size"),
    [
        # (norm1 x attention + no attention) x (norm2 x FFNs x stabiliser + no FFN), to the number of layers
        ("gpt2-small", ((3 * 3 + 1) * (3 * 5 * 2 + 1)) ** 12),
        ("gpt2-papers", ((2 * 2 + 0) * (2 * 5 * 2 + 1)) ** 12),
        ("gpt2-forms", ((3 * 3 + 1) * (3 * 4 * 1 + 1)) ** 12),
        ("smollm2-135m", ((3 * 3 + 1) * (3 * 5 * 1 + 1)) ** 30),
        ("ladder", 4 + 11 + 2 + 11),
        ("tiny", (2 * (3 * 2 + 1)) ** 2),  # norm1 2 x (3 FFNs x 2 stabilisers + no FFN), two layers
    ],
)
def test_exact_size(name, size):
    assert num_architectures(load_space(name)) == size
    assert num_members(load_space(name)) == 2 * size


def test_enumeration_gives_every_member_once_also_under_the_constraint(small_space, make_space):
    all_members = list(members(small_space))
    assert len(all_members) == len(set(all_members)) == num_members(small_space)
    assert all(contains(small_space, member) for member in all_members)
    assert len({arch_id(member.architecture) for member in all_members}) == num_architectures(small_space)
    # with k kept layers of 8 choices each, then 3 - k removed FFNs of 2 each
    assert num_architectures(make_space()) == 10**3
    assert num_architectures(make_space("ffn-removed-only-in-deepest-suffix")) == 8**3 + 8**2 * 2 + 8 * 2**2 + 2**3


def test_layers_with_an_exact_softmax_offer_no_bounded_one():
    space = load_space("smollm2-135m")
    exact = without(space, Withheld(bounded=(3, 29)))
    bounded = sum(layer.attention == "bounded" for layer in space.layers)
    assert num_architectures(exact) == 160**28 * (160 - bounded) ** 2
    depths = {v.depth for v in exact.graph if isinstance(v, Choice) and v.layer.attention == "bounded"}
    assert depths == set(range(30)) - {3, 29}
    assert without(exact, Withheld(bounded=(3,))) is exact
    with pytest.raises(ValueError, match=r"`withheld.bounded` of space 'smollm2-135m' must name layers from 0 to 29"):
        without(space, Withheld(bounded=(30,)))


def test_members_may_begin_with_layers_that_are_given():
    space = load_space("gpt2-papers")
    first = parse("1xLBLGo-11xLSLGo", space.base).architecture.layers[:2]  # a bounded softmax is not among its choices
    begun = with_first_layers(space, first)
    assert num_architectures(begun) == len(space.layers) ** 10
    assert {member_at(begun, index).architecture.layers[:2] for index in (0, num_members(begun) - 1)} == {first}
    assert all(v.layer in space.layers for v in begun.graph if isinstance(v, Choice) and v.depth > 1)
    with pytest.raises(ValueError, match="must leave a layer of 12 to choose, but begins with 12"):
        with_first_layers(space, first * 6)
    with pytest.raises(ValueError, match="`first_layers` goes with `choices`, but the space lists its `members`"):
        with_first_layers(load_space("ladder"), first)


def test_ladder_is_the_papers_rows_whose_choices_are_in_the_large_space():
    space = load_space("ladder")
    pruned = [f"SM+ScFuFFN_i{p}" for p in range(1, 12)]
    plain = ["SM+LN+G", "SM+LN+R", "SM+ScFFN", "SM+ScFuFFN", *pruned]
    names = plain + [name.replace("SM", "SM(t)") for name in plain[2:]]
    member_names = [name_of(member.architecture) for member in members(space) if not member.entropy_regularised]
    assert sorted(member_names) == sorted(names)
    large, papers, rng = load_space("gpt2-small"), load_space("gpt2-papers"), np.random.default_rng(0)
    assert all(contains(large, sample(papers, rng)) for _ in range(20))


@pytest.mark.parametrize("name", ["gpt2-papers", "gpt2-small"])
def test_the_published_rows_are_in_the_large_spaces(name):
    large = load_space(name)
    assert all(contains(large, member) for member in members(load_space("ladder")))


def test_membership_asks_for_base_placement_and_recipe_and_is_a_path():
    space = load_space("tiny")
    member = parse("LSoRs-oSooo", space.base)
    assert contains(space, member)
    assert contains(space, replace(member, entropy_regularised=True))
    assert not contains(space, replace(member, architecture=replace(member.architecture, d_ff=1)))
    assert not contains(space, replace(member, architecture=replace(member.architecture, final_norm="none")))
    assert not contains(space, parse("LSLRs-oSooo", space.base))  # no norm2 in this space
    assert not contains(space, parse("SM+R", replace(space.base, layers=space.base.layers * 2)))
    plain = replace(space, definition=replace(space.definition, entropy_regularisation=(False,)))
    assert not contains(plain, replace(member, entropy_regularised=True))
    space = load_space("tiny")
    path = path_of(space, parse("LSoRs-oSooo", space.base).architecture.layers)
    assert [type(vertex).__name__ for vertex in path] == ["Boundary", "Choice"] * 2 + ["Boundary", "Head"]
    assert all(space.graph.has_edge(*edge) for edge in pairwise(path))
    with pytest.raises(ValueError, match="not in space 'tiny'"):
        path_of(space, parse("SM+LN+G", space.base).architecture.layers)


@pytest.mark.parametrize("index", [-1, 392])
def test_numbers_beyond_the_space_are_refused(index):
    with pytest.raises(ValueError, match=f"member index must be from 0 to 391, but got {index}"):
        member_at(load_space("tiny"), index)


def test_sampling_is_uniform():
    """Chi-square over the 392 members of tiny, 50 draws expected of each; beyond +-5 standard deviations is a bug."""
    space, rng = load_space("tiny"), np.random.default_rng(0)
    size, expected = num_members(space), 50
    counts = Counter(sample(space, rng) for _ in range(size * expected))
    assert len(counts) == size
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert abs(statistic - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5


@pytest.mark.parametrize("bound", [1, 2, 3, 255, 256, 257, 10**30])
def test_random_below_stays_below_and_reaches_both_ends(bound):
    rng = np.random.default_rng(0)
    drawn = [random_below(bound, rng) for _ in range(3000)]
    assert all(0 <= value < bound for value in drawn)
    assert min(drawn) <= bound // 100
    assert max(drawn) >= bound - 1 - bound // 100


SAMPLED = """
import numpy as np
from search_spaces.space import *
from search_spaces.architecture import arch_id
rng = np.random.default_rng(3)
for space in map(load_space, ("gpt2-small", "ladder")):
    print([arch_id(sample(space, rng).architecture) for _ in range(5)])
"""


def test_the_same_seed_samples_the_same_members_in_another_process():
    """The order of vertices must not hang on the hash seed of the process."""
    first, second = (python("-c", SAMPLED, env={"PYTHONHASHSEED": seed}) for seed in ("1", "2"))
    assert (first, first.count("[")) == (second, 2)


def differing(first: Member, second: Member) -> int:
    pairs = zip(first.architecture.layers, second.architecture.layers, strict=True)
    return sum(layer != other for layer, other in pairs)


@pytest.mark.parametrize("name", SHIPPED)
def test_offspring_are_members_and_mutants_differ(name):
    space, rng = load_space(name), np.random.default_rng(0)
    for _ in range(240 // space.base.num_layers):
        first, second = sample(space, rng), sample(space, rng)
        mutant = mutate(space, first, rng)
        assert contains(space, mutant)
        assert mutant != first
        assert contains(space, crossover(space, first, second, rng))


def test_mutation_changes_one_or_two_neighbouring_layers_or_the_recipe(small_space):
    rng = np.random.default_rng(1)
    changes: Counter[tuple[int, bool]] = Counter()
    for _ in range(500):
        member = sample(small_space, rng)
        mutant = mutate(small_space, member, rng)
        flipped = mutant.entropy_regularised != member.entropy_regularised
        changes[differing(member, mutant), flipped] += 1
    assert set(changes) == {(1, False), (2, False), (0, True)}
    assert 60 < changes[0, True] < 190  # one move in four, at three layers


def test_mutation_reaches_every_member(make_space):
    for space in (make_space(num_layers=2), make_space("ffn-removed-only-in-deepest-suffix", num_layers=2)):
        rng, member = np.random.default_rng(2), member_at(space, 0)
        seen = {member}
        for _ in range(16 * num_members(space)):
            member = mutate(space, member, rng)
            seen.add(member)
        assert len(seen) == num_members(space)


def test_the_only_member_has_no_other_and_outsiders_are_refused():
    rng = np.random.default_rng(0)
    definition = Definition(name="one", base="tiny", members=("SM+R",), entropy_regularisation=(True,))
    space = build_space(definition)
    member = member_at(space, 0)
    assert mutate(space, member, rng) == member
    both = build_space(replace(definition, entropy_regularisation=(False, True)))
    assert mutate(both, member, rng) == replace(member, entropy_regularised=False)
    space, rng = load_space("tiny"), np.random.default_rng(0)
    member, outsider = member_at(space, 0), parse("SM+LN+G", space.base)
    for vary in (
        lambda: mutate(space, outsider, rng),
        lambda: crossover(space, outsider, member, rng),
        lambda: crossover(space, member, outsider, rng),
    ):
        with pytest.raises(ValueError, match="only a member of space 'tiny' can be varied"):
            vary()


def test_crossover_takes_every_layer_from_a_parent(small_space):
    rng = np.random.default_rng(3)
    for _ in range(200):
        first, second = sample(small_space, rng), sample(small_space, rng)
        child = crossover(small_space, first, second, rng)
        origins = zip(*(member.architecture.layers for member in (child, first, second)), strict=True)
        assert all(layer in (first_layer, second_layer) for layer, first_layer, second_layer in origins)
        assert child.entropy_regularised in (first.entropy_regularised, second.entropy_regularised)


def test_crossover_gives_a_new_placement_where_it_can_and_else_a_parent():
    space, rng = load_space("tiny"), np.random.default_rng(0)
    first, second = parse("oSoGo-oSoGo", space.base), parse("LSoRs-LSoRs", space.base)
    children = Counter(crossover(space, first, second, rng).architecture.layers for _ in range(100))
    gelu, relu = Layer(ffn="gelu"), Layer(norm1="layernorm", ffn="relu", stabiliser="scaled")
    assert set(children) == {(gelu, relu), (relu, gelu)}
    space = build_space(Definition(name="two", base="tiny", members=("SM+LN+G", "SM+R")))
    first, second = member_at(space, 0), member_at(space, 2)
    parents = {crossover(space, first, second, np.random.default_rng(seed)).architecture for seed in range(20)}
    assert parents == {first.architecture, second.architecture}


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


def test_every_shipped_file_is_listed_and_others_are_refused(tmp_path):
    folder = Path(__file__).parents[2] / "search_spaces" / "spaces"
    assert sorted(path.stem for path in folder.glob("*.yaml")) == sorted(SHIPPED)
    with pytest.raises(ValueError, match=r"no\.yaml cannot be read: No such file or directory\."):
        load_space(str(tmp_path / "no.yaml"))
    with pytest.raises(ValueError, match=r"space must be one of gpt2-small, .*, tiny or the path of a \.yaml file"):
        load_space("gpt2")


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
        (CHOICES.replace("[gelu, none]", "[gelu, swish]"), "item 1 of `ffn` of `choices` of PATH must be one of"),
        (CHOICES.replace("[gelu, none]", "[]"), "`choices` of PATH: `ffn` must list at least one item, but is empty."),
        (CHOICES.replace("[gelu, none]", "[gelu, gelu]"), "`choices` of PATH: `ffn` must list each item on"),
        (CHOICES + "members: [SM]\n", "PATH: a space must have either `choices` or `members`, and not both."),
        ("name: mine\nbase: tiny\n", "PATH: a space must have either `choices` or `members`, and not both."),
        (CHOICES + "constraints: [fun]\n", "item 0 of `constraints` of PATH must be one of ffn-removed-only-in-"),
        (CHOICES + "entropy_regularisation: []\n", "PATH: `entropy_regularisation` must list at least one item, but "),
        (CHOICES + "entropy_regularisation: [1]\n", "item 0 of `entropy_regularisation` of PATH must be of type"),
        (CHOICES + "dimensions: {depth: 3}\n", "`dimensions` of PATH has the unknown key 'depth'; known keys are "),
        (MEMBERS.replace("SM+R", "SM+Q"), "architecture must be a name like SM+LN+G, "),
        (MEMBERS.replace("SM+R", "EReg(SM+R)"), "member 'EReg(SM+R)' must be without EReg(...); "),
        (MEMBERS.replace("SM+R", "1xLSoGo-1xoSoGo-o"), "member '1xLSoGo-1xoSoGo-o' must have the final norm that its "),
        (MEMBERS.replace("SM+R", "HH(SM+R)"), "member 'HH(SM+R)' must keep the 'gpt2' block of its base"),
        (MEMBERS.replace("SM+R", "SM+LN+G"), "PATH: `members` must list each item once, but lists 'SM+LN+G' twice."),
        (MEMBERS.replace("[SM+LN+G, SM+R]", "[]"), "PATH: `members` must list at least one item, but is empty."),
        (MEMBERS + "constraints: [ffn-removed-only-in-deepest-suffix]\n", "PATH: `constraints` goes with `choices`"),
        (CHOICES + "withheld: {power8: [1, 1]}\n", "`withheld` of PATH: `withheld.power8` must list each item once,"),
    ],
)
def test_bad_definitions_are_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        load_space(str(path))
    assert str(refused.value).startswith(message.replace("PATH", str(path)))
    assert "\n" not in str(refused.value)
