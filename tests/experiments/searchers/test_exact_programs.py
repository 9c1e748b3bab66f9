"""The benchmark of the exact programs, small."""

from costmodel.cost import Budget
from experiments.__main__ import settings_of
from experiments.searchers.exact_programs import measured


def test_every_program_is_measured() -> None:
    settings = settings_of("exact-programs", space="tiny", rounds=2, seq_len=16)
    figures = measured(settings, Budget(latency_s=25.0), "25 s")
    assert [figure.name for figure in figures] == [
        f"{program}, 25 s" for program in ("count what fits", "solve", "frontier")
    ]
    assert [figure.most for figure in figures] == [2.0, 0.1, 1.0]
    assert all(figure.value > 0 for figure in figures)
