import json
import math
from pathlib import Path
from typing import Any

import pytest

from experiments.papers import diagnostics
from experiments.papers.results import Experiment, Trained, perplexity_table
from experiments.papers.settings import Row, Settings
from experiments.trainings import Ended
from nas.recipe.overrides import EntropyChanges, RecipeChanges

EREG = "EReg(SM(t)+ScFuFFN)"


def diagnosis(step: int, entropies: list, **more: object) -> dict:
    plain: dict[str, Any] = {"quarter_shares": None, "flags": [], "num_nan": [0, 0], "thresholds": None, "scalars": {}}
    return {"step": step, "head_entropies": entropies} | plain | more


def experiment(folder: Path, diagnoses: dict[str, list[dict]], rows: dict[str, Row], **more) -> Experiment:
    settings = Settings(scale="smoke", title="tiny", base="tiny", seeds=(0,), views=("nans",), rows=rows, **more)
    trained = {}
    for index, row in enumerate(rows):
        place = folder / str(index)
        place.mkdir()
        (place / "diagnostics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in diagnoses[row]))
        trained[row] = (
            Trained(Ended(None if row == "SM" else 20.0 + index, 8192, 1.0, "boom" if row == "SM" else ""), place),
        )
    return Experiment("x", settings, trained)


def test_quarters_are_of_the_last_diagnosis_that_has_them_beside_the_printed(tmp_path: Path):
    diagnoses = [
        diagnosis(1, [[1.0, 2.0]], quarter_shares=[0.5, 0, 0, 0.5]),
        diagnosis(2, [[1.0, 2.0]], quarter_shares=[0, 0.25, 0.25, 0.5]),
        diagnosis(3, [[None, 2.0]]),
    ]
    made = experiment(tmp_path, {"SM": diagnoses}, {"SM": Row()}, printed_shares={"SM": (33, 10, 12, 45)})
    assert diagnostics.quarters_table(made).rows == (("SM", 0, 25, 25, 50, 33, 10, 12, 45),)
    bars = [[series[1] for series in panel.series] for panel in diagnostics.quarters_figure(made).panels]
    assert bars == [[(0,), (25,), (25,), (50,)], [(33,), (10,), (12,), (45,)]]


def test_the_onset_of_nans_is_the_first_diagnosis_with_any(tmp_path: Path):
    diagnoses = [
        diagnosis(1, [[1.0], [1.0]]),
        diagnosis(2, [[None], [1.0]], num_nan=[0, 7]),
        diagnosis(3, [[1.0], [1.0]]),
    ]
    example = experiment(tmp_path, {"SM": diagnoses, "SM+R": diagnoses[:1]}, {"SM": Row(), "SM+R": Row()})
    assert diagnostics.nans_table(example).rows == (
        ("SM", "boom", 3, 2, "1", 7),
        ("SM+R", "completed", 1, None, None, 0),
    )
    assert math.isinf(example.perplexities["SM"])


def test_layers_by_step_leave_out_what_is_no_number(tmp_path: Path):
    diagnoses = [diagnosis(1, [[1.0, 3.0], [2.0, 2.0]]), diagnosis(2, [[None, 1.0], [4.0, 2.0]])]
    example = experiment(tmp_path, {"SM+R": diagnoses}, {"SM+R": Row()})
    assert diagnostics.steps_table(example).rows == (("SM+R", 1, 2, 2), ("SM+R", 2, None, 3))
    first, second = diagnostics.steps_figure(example).panels[0].series
    assert (first.x, first.y) == ((1,), (2,))
    assert (second.x, second.y) == ((1, 2), (2, 3))


def test_thresholds_and_slopes_are_those_recorded(tmp_path: Path):
    scalars = {"layers.0.ffn.1.slope": [0.01], "layers.1.ffn.1.slope": [0.02], "layers.0.alpha": [1.0]}
    diagnoses = [diagnosis(1, [[1.0], [1.0]], thresholds=[[0.3, 0.4], [0.5, 0.6]], scalars=scalars)]
    example = experiment(tmp_path, {EREG: diagnoses}, {EREG: Row()})
    table, figure, _ = diagnostics.THRESHOLDS
    assert table is not None
    assert figure is not None
    assert table(example).rows == ((EREG, 0, 0.3, 0.4), (EREG, 1, 0.5, 0.6))
    assert figure(example).panels[0].limits == (0.3, 0.6)
    assert diagnostics.slopes_table(example).rows == ((EREG, 1, "layers.0", 0.01), (EREG, 1, "layers.1", 0.02))


def test_margins_are_of_the_recipes_that_trained(tmp_path: Path):
    def changes(margin: float) -> Row:
        return Row(net=EREG, recipe=RecipeChanges(entropy=EntropyChanges(margin=margin)))

    rows = {"wide": changes(0.3), "narrow": changes(0.0), "default": Row(net=EREG)}
    diagnoses = [diagnosis(1, [[1.0, 3.0]], quarter_shares=[0, 0.5, 0, 0.5])]
    example = experiment(tmp_path, dict.fromkeys(rows, diagnoses), rows)
    assert diagnostics.margins_table(example).rows == (
        ("wide", 0.3, 20, 2, 1, 3, 50),
        ("narrow", 0.0, 21, 2, 1, 3, 50),
        ("default", 0.2, 22, 2, 1, 3, 50),
    )
    (series,) = diagnostics.margins_figure(example).panels[0].series
    assert (series.x, series.y) == ((0.0, 0.2, 0.3), (21, 22, 20))


def test_ranks_and_spearman_are_over_the_printed_rows(tmp_path: Path):
    rows = {"SM": Row(perplexity="diverged"), "SM+R": Row(perplexity=3.0), "SM+G": Row(perplexity=2.0), "SM+LN": Row()}
    example = experiment(tmp_path, {row: [] for row in rows}, rows)  # here SM+R 21 is before SM+G 22, SM diverged
    table = perplexity_table(example)
    assert [row[-2:] for row in table.rows] == [(3, 3), (2, 1), (1, 2), (None, None)]
    # ranks differ by 0, 1 and 1: 1 - 6 * 2 / (3 * 8)
    assert any("over 3 rows 0.50, 2 of 3 pairs in their order" in note for note in table.notes)
    assert "SM diverged: boom" in table.notes


def test_a_training_without_diagnoses_has_none_and_broken_ones_are_refused(tmp_path: Path):
    path, trained = tmp_path / "diagnostics.jsonl", Trained(Ended(1.0, 1, 1.0, ""), tmp_path)
    path.write_text("")
    assert trained.diagnoses() == []
    path.write_text("{")
    with pytest.raises(ValueError, match="must hold the diagnostics"):
        trained.diagnoses()
