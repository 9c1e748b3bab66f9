from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from search_spaces.architecture import Layer
from search_spaces.definition import SHIPPED, Definition
from search_spaces.notation import Member, parse
from search_spaces.space import build_space, contains, load_space, member_at, num_members, sample
from search_spaces.variation import crossover, mutate


def differing(first: Member, second: Member) -> int:
    pairs = zip(first.architecture.layers, second.architecture.layers, strict=True)
    return sum(layer != other for layer, other in pairs)


@pytest.mark.parametrize("name", SHIPPED)
def test_offspring_are_members_and_mutants_differ(name):
    space, rng = load_space(name), np.random.default_rng(0)
    for _ in range(720 // space.base.num_layers):
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


def test_mutation_reaches_every_member(small_space):
    """From one member, by a walk long enough to see all."""
    rng, member = np.random.default_rng(2), member_at(small_space, 0)
    seen = {member}
    for _ in range(12 * num_members(small_space)):
        member = mutate(small_space, member, rng)
        seen.add(member)
    assert len(seen) == num_members(small_space)


def test_mutation_in_a_listed_space_moves_to_a_near_member():
    """Pruning depths next to each other differ in one layer, so most moves from _i6 change few layers."""
    space, rng = load_space("ladder"), np.random.default_rng(0)
    member = parse("SM+ScFuFFN_i6", space.base)
    distances = [differing(member, mutate(space, member, rng)) for _ in range(200)]
    assert np.median(distances) <= 3


def test_the_only_member_has_no_other():
    rng = np.random.default_rng(0)
    definition = Definition(name="one", base="tiny", members=("SM+R",), entropy_regularisation=(True,))
    space = build_space(definition)
    member = member_at(space, 0)
    assert mutate(space, member, rng) == member
    both = build_space(replace(definition, entropy_regularisation=(False, True)))
    assert mutate(both, member, rng) == replace(member, entropy_regularised=False)


def test_crossover_takes_every_layer_from_a_parent(small_space):
    rng = np.random.default_rng(3)
    for _ in range(200):
        first, second = sample(small_space, rng), sample(small_space, rng)
        child = crossover(small_space, first, second, rng)
        origins = zip(*(member.architecture.layers for member in (child, first, second)), strict=True)
        assert all(layer in (first_layer, second_layer) for layer, first_layer, second_layer in origins)
        assert child.entropy_regularised in (first.entropy_regularised, second.entropy_regularised)


def test_crossover_gives_a_new_placement_where_it_can():
    space, rng = load_space("tiny"), np.random.default_rng(0)
    first, second = parse("oSoGo-oSoGo", space.base), parse("LSoRs-LSoRs", space.base)
    children = Counter(crossover(space, first, second, rng).architecture.layers for _ in range(100))
    gelu, relu = Layer(ffn="gelu"), Layer(norm1="layernorm", ffn="relu", stabiliser="scaled")
    assert set(children) == {(gelu, relu), (relu, gelu)}


def test_crossover_without_a_legal_child_gives_a_parent():
    space = build_space(Definition(name="two", base="tiny", members=("SM+LN+G", "SM+R")))
    first, second = member_at(space, 0), member_at(space, 2)
    children = {crossover(space, first, second, np.random.default_rng(seed)).architecture for seed in range(20)}
    assert children == {first.architecture, second.architecture}


def test_outsiders_are_refused():
    space, rng = load_space("tiny"), np.random.default_rng(0)
    member, outsider = member_at(space, 0), parse("SM+LN+G", space.base)
    for vary in (
        lambda: mutate(space, outsider, rng),
        lambda: crossover(space, outsider, member, rng),
        lambda: crossover(space, member, outsider, rng),
    ):
        with pytest.raises(ValueError, match="only a member of space 'tiny' can be varied"):
            vary()
