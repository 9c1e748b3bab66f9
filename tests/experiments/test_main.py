import re
from typing import Any

import pytest

from costmodel.errors import UserError
from experiments.__main__ import KINDS, definitions, kind_of, run, settings_of
from experiments.papers import run as papers


def test_every_experiment_has_a_known_kind():
    assert {kind_of(name) for name in definitions()} <= set(KINDS)


@pytest.mark.parametrize(("name", "end"), [("moon", "'moon'."), ("aero-step", "'aero-step'; did you mean aero-steps?")])
def test_an_unknown_experiment_is_refused_by_name_with_the_nearest(name, end):
    with pytest.raises(ValueError, match=f"experiment must be one of .*smollm2.* but got {re.escape(end)}$"):
        run(name)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("seconds-small", {"repeats": 1}, "`repeats` must be at least 2, to see a spread, but got 1"),
        ("bench", {"rounds": 0}, "`rounds` must be positive, but got 0"),
        ("bench", {"bars": 1}, "unknown key 'bars'"),
    ],
)
def test_bad_settings_are_refused(name: str, change: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        settings_of(name, **change)


def test_all_are_the_experiments_on_the_papers(monkeypatch):
    ran = []
    monkeypatch.setattr(papers, "run", lambda name, settings, console, pool: ran.append((name, settings.scale)))
    run("all", "smoke")
    assert ran
    assert ran == [(name, "smoke") for name in definitions() if kind_of(name) == "paper"]
