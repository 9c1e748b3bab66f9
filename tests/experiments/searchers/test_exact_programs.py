"""The benchmark of the exact programs, small."""

from dataclasses import replace

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from costmodel.cost import Budget
from experiments.__main__ import definitions
from experiments.searchers.exact_programs import Settings, measured

DATA = {key: value for key, value in load_mapping(definitions()["exact-programs"]).items() if key != "kind"}


def test_every_program_is_measured() -> None:
    settings = replace(decode(Settings, DATA, "experiment exact-programs"), space="tiny", rounds=2, seq_len=16)
    found = measured(settings, Budget(latency_s=25.0))
    assert [program for program, _, _ in found] == ["count what fits", "solve", "frontier", "4 that differ in 2 layers"]
    assert [bar_s for _, _, bar_s in found] == [2.0, 0.1, 1.0, None]
    assert all(seconds > 0 for _, seconds, _ in found)
