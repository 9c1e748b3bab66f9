"""Experiments by name, and their flags."""

import re

import pytest

from costmodel.errors import UserError
from experiments.__main__ import definitions, list_experiments, run, settings_of


def test_every_experiment_has_the_settings_of_its_kind():
    assert all(type(settings_of(name)).__module__.startswith("experiments.") for name in definitions())


@pytest.mark.parametrize(("name", "end"), [("moon", "'moon'."), ("smollm", "'smollm'; did you mean smollm2?")])
def test_an_unknown_experiment_is_refused_by_name_with_the_nearest(name, end):
    with pytest.raises(ValueError, match=f"experiment must be one of .*smollm2.* but got {re.escape(end)}$"):
        run(name)


def test_the_list_has_whole_sentences(capsys):
    list_experiments()
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines} == set(definitions())
    assert all(line.endswith((".", "?")) for line in lines)


@pytest.mark.parametrize(
    ("function", "name", "given", "message"),
    [
        (settings_of, "smollm2", {"prompts": []}, "unknown key 'prompts'"),
        (settings_of, "gpu", {"bars": 1}, "unknown key 'bars'"),
        (run, "table", {"device": "cpu"}, "table does not take --device; flags that it takes: --scale"),
        (
            run,
            "engines",
            {"parts": "step"},
            "engines does not take --parts; .* takes: --output-dir, --parent",
        ),
    ],
)
def test_bad_settings_and_flags_of_other_experiments_are_refused(function, name, given, message):
    with pytest.raises(UserError, match=message):
        function(name, **given)
