import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from search_spaces.architecture import arch_id
from search_spaces.definition import Withheld
from search_spaces.graph import Choice
from search_spaces.notation import name_of, parse
from search_spaces.space import (
    contains,
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


def test_enumeration_gives_every_member_once(small_space):
    all_members = list(members(small_space))
    assert len(all_members) == len(set(all_members)) == num_members(small_space)
    assert all(contains(small_space, member) for member in all_members)
    assert len({arch_id(member.architecture) for member in all_members}) == num_architectures(small_space)


def test_size_under_the_constraint(make_space):
    """With k kept layers of 8 choices each, then 3 - k removed FFNs of 2 each."""
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


def test_ladder_is_the_papers_rows():
    space = load_space("ladder")
    pruned = [f"SM+ScFuFFN_i{p}" for p in range(1, 12)]
    plain = ["SM+LN+G", "SM+LN+R", "SM+ScFFN", "SM+ScFuFFN", *pruned]
    names = plain + [name.replace("SM", "SM(t)") for name in plain[2:]]
    member_names = [name_of(member.architecture) for member in members(space) if not member.entropy_regularised]
    assert sorted(member_names) == sorted(names)


@pytest.mark.parametrize("name", ["gpt2-papers", "gpt2-small"])
def test_the_published_rows_are_in_the_large_spaces(name):
    large = load_space(name)
    assert all(contains(large, member) for member in members(load_space("ladder")))


def test_the_papers_choices_are_among_those_of_the_large_space():
    large, papers, rng = load_space("gpt2-small"), load_space("gpt2-papers"), np.random.default_rng(0)
    assert all(contains(large, sample(papers, rng)) for _ in range(20))


def test_membership_asks_for_base_placement_and_recipe():
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


def test_path_of_a_member_alternates_boundaries_and_choices():
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


def test_the_same_seed_samples_the_same_members_in_another_process():
    """The order of vertices must not hang on the hash seed of the process."""
    code = (
        "import numpy as np\n"
        "from search_spaces.space import *\n"
        "from search_spaces.architecture import arch_id\n"
        "rng = np.random.default_rng(3)\n"
        "for name in ('gpt2-small', 'ladder'):\n"
        "    space = load_space(name)\n"
        "    print([arch_id(sample(space, rng).architecture) for _ in range(5)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("[") == 2
