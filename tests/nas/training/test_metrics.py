"""metrics.csv and diagnostics.jsonl after a kill: lines past the checkpoint and a torn line are gone."""

import json
from itertools import product
from pathlib import Path

import pytest

from nas.training.diagnostics import Diagnosis
from nas.training.metrics import COLUMNS, DIAGNOSTICS_FILE, METRICS_FILE, MetricsLog, StepMetrics


def write(folder: Path, steps: range, *, last_step: int = 0) -> None:
    log = MetricsLog(folder, last_step=last_step)
    for step in steps:
        log.add(
            StepMetrics(
                step=step,
                tokens=step * 64,
                learning_rate=1 / 3,
                train_loss=2.5,
                penalty=0.0,
                gradient_norm=1.0,
                seconds=0.1,
            )
        )
        if step % 2 == 0:
            log.add_diagnosis(looked_into(step))
    log.flush()
    log.close()


def looked_into(step: int) -> Diagnosis:
    return Diagnosis(
        step=step,
        head_entropies=[[1.5, None]],
        quarter_shares=None,
        flags=(),
        num_nan=[3],
        gradient_norms={"embed": 0.5},
        thresholds=None,
        temperatures={},
        scalars={},
    )


def steps_in(folder: Path) -> list[str]:
    header, *rows = (folder / METRICS_FILE).read_text().splitlines()
    assert header.split(",") == list(COLUMNS)
    return [row.split(",")[0] for row in rows]


@pytest.mark.parametrize(
    ("name", "torn"),
    [
        *product([METRICS_FILE], ["", "6", "6,384,0.33", "\x00\x00"]),
        *product([DIAGNOSTICS_FILE], ["", "{", '{"step": 6, "head', '{"stop": 1}\n', "[]\n", "\x00\x00"]),
    ],
)
def test_a_resumed_log_is_that_of_an_unbroken_run_to_the_byte(tmp_path: Path, name: str, torn: str) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    write(whole, range(1, 7))
    write(resumed, range(1, 6))
    (resumed / name).write_text((resumed / name).read_text() + torn)
    write(resumed, range(4, 7), last_step=3)
    for file in (METRICS_FILE, DIAGNOSTICS_FILE):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes()
    assert steps_in(resumed) == ["1", "2", "3", "4", "5", "6"]
    diagnoses = [json.loads(line) for line in (resumed / DIAGNOSTICS_FILE).read_text().splitlines()]
    assert [(diagnosis["step"], diagnosis["head_entropies"]) for diagnosis in diagnoses] == [
        (step, [[1.5, None]]) for step in (2, 4, 6)
    ]


def test_a_run_that_starts_over_starts_the_log_over(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(1, 3))
    assert steps_in(tmp_path) == ["1", "2"]


def test_numbers_are_written_in_full(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    row = (tmp_path / METRICS_FILE).read_text().splitlines()[1].split(",")
    assert float(row[COLUMNS.index("learning_rate")]) == 1 / 3
    assert row[COLUMNS.index("val_loss")] == ""
