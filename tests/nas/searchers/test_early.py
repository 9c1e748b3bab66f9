"""Ends of trainings that are expected of members that were cut from a nested training."""

import math

import pytest

from nas.searchers.early import BEFORE, CUT, after_cuts, after_trainings
from nas.searchers.strategy import Trained
from search_spaces.bases import BASES
from search_spaces.notation import Member, parse

BASE = 2.0


def member(notation: str) -> Member:
    return parse(notation, BASES["tiny"])


def ended(notation: str, loss: float | None) -> Trained:
    return Trained(member=member(notation), latency_s=1.0, log_perplexity=loss)


def test_nothing_cut_is_nothing_expected():
    assert after_cuts({}, [ended("2xLSLGo", 2.0)], BASE) == []


def test_before_any_end_the_prior_weighs_the_cut_and_the_forms_of_layers():
    cuts = {member("2xoSoRo"): 0.4, member("1xLHLRo-1xoooFo"): 0.4}
    plain, other = after_cuts(cuts, [], BASE)
    assert plain.log_perplexity == pytest.approx(BASE + CUT.mean[0] + 0.4 * CUT.mean[1])
    # of two layers half the heads in one, no attention, a linear FFN and two live norms in one each
    forms = 0.5 * (CUT.mean[2] + CUT.mean[3] + CUT.mean[4]) + 1.0 * CUT.mean[6]
    assert other.log_perplexity == pytest.approx(plain.log_perplexity + forms)
    assert other.deviation == plain.deviation == pytest.approx(CUT.around + 0.4 * CUT.per_nat)


def test_what_ended_worse_than_its_cut_said_moves_members_of_the_same_forms_most():
    cuts = {member(name): 0.4 for name in ("2xoHoRo", "2xlHlRo", "2xoSoRo", "2xlSlRo")}
    before = {one.member: one for one in after_cuts(cuts, [], BASE)}
    worse = before[member("2xoHoRo")].log_perplexity + 0.1
    after = {one.member: one for one in after_cuts(cuts, [ended("2xoHoRo", worse), ended("2xlSlRo", None)], BASE)}
    moved = {
        name: after[member(name)].log_perplexity - before[member(name)].log_perplexity
        for name in ("2xlHlRo", "2xlSlRo")
    }
    assert 0.1 > moved["2xlHlRo"] > moved["2xlSlRo"] > 0.01


def test_what_was_looked_at_alone_or_cut_by_nobody_moves_nothing():
    cuts = {member("2xoHoRo"): 0.4}
    looked_at = Trained(member=member("2xoHoRo"), latency_s=1.0, log_perplexity=3.0, deviation=0.02)
    assert after_cuts(cuts, [looked_at, ended("2xoSoRo", 3.0)], BASE) == after_cuts(cuts, [], BASE)


def test_of_a_cut_that_overflows_nothing_is_expected():
    cuts = {member("2xoHoRo"): 0.4, member("2xoSoRo"): math.inf, member("2xlSlRo"): math.nan}
    assert [one.member for one in after_cuts(cuts, [ended("2xoSoRo", 3.0)], BASE)] == [member("2xoHoRo")]


def test_trainings_of_before_are_moved_by_what_was_trained_anew():
    known = [ended("2xoHoRo", BASE + 0.4), ended("2xoSoRo", BASE + 0.2), ended("2xlSlRo", None)]
    plain, moved = (
        {one.member: one.log_perplexity or math.nan for one in after_trainings(known, trained, BASE)}
        for trained in ([], [ended("2xoHoRo", BASE + 0.3)])
    )
    assert plain[member("2xoSoRo")] == pytest.approx(BASE + BEFORE.mean[0] + 0.2 * BEFORE.mean[1])
    assert plain.keys() == moved.keys() == {member("2xoHoRo"), member("2xoSoRo")}
    assert all(BASE < moved[place] < plain[place] - 0.005 for place in plain)
