import pytest

from costmodel.config.strict_yaml import load_mapping
from experiments.__main__ import KINDS, definitions, run


def test_every_experiment_has_a_known_kind():
    assert {load_mapping(path)["kind"] for path in definitions().values()} <= set(KINDS)


def test_an_unknown_experiment_is_refused_by_name():
    with pytest.raises(ValueError, match="experiment must be one of .*fidelity"):
        run("moon")
