from dataclasses import replace

import pytest

from costmodel.calibration.second_opinion import ONLINE_BAR, opinions


def test_linears_agree_online_and_everything_within_a_factor_of_twenty():
    ratios = {opinion.title: opinion.own_bytes / opinion.other_bytes for opinion in opinions()}
    # two parties open 128 x 768 and 768 x 3072 words, and two of 4 bytes for each of 128 x 3072 results
    own_bytes = 2 * 8 * (128 * 768 + 768 * 3072) + 2 * 4 * 128 * 3072
    assert ratios["linear 128x768x3072, two parties, online"] == pytest.approx(own_bytes / 45.6e6)
    assert abs(ratios["linear 128x768x3072, two parties, online"] - 1) < ONLINE_BAR
    assert abs(ratios["linear 128x768x3072, three parties, online"] - 1) < ONLINE_BAR
    assert abs(ratios["ReLU 128x3072, sent by a dealer"] - 1) < ONLINE_BAR
    assert all(1 / 20 < ratio < 2 for ratio in ratios.values())


def test_bars_bind():
    first = opinions()[0]
    assert first.check.passed
    assert not replace(first, own_bytes=first.own_bytes * 1.2).check.passed
