"""Ends that are expected of members that were trained before by another recipe."""

import math

import pytest

from nas.searchers.early import BEFORE, after_trainings
from nas.searchers.strategy import Trained
from search_spaces.bases import BASES
from search_spaces.notation import Member, parse

BASE = 2.0


def member(notation: str) -> Member:
    return parse(notation, BASES["tiny"])


def ended(notation: str, loss: float | None) -> Trained:
    return Trained(member=member(notation), latency_s=1.0, log_perplexity=loss)


def test_trainings_of_before_are_moved_by_what_was_trained_anew():
    known = [ended("2xoHoRo", BASE + 0.4), ended("2xoSoRo", BASE + 0.2), ended("2xlSlRo", None)]
    plain, moved = (
        {training.member: training.log_perplexity or math.nan for training in after_trainings(known, trained, BASE)}
        for trained in ([], [ended("2xoHoRo", BASE + 0.3)])
    )
    assert plain[member("2xoSoRo")] == pytest.approx(BASE + BEFORE.mean[0] + 0.2 * BEFORE.mean[1])
    assert plain.keys() == moved.keys() == {member("2xoHoRo"), member("2xoSoRo")}
    assert all(BASE < moved[place] < plain[place] - 0.005 for place in plain)
