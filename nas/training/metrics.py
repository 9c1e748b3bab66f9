"""The training curve of a trial on disk: a row per step, also for TensorBoard, and an object per diagnosed step.

A resumed trial first drops rows after its checkpoint, so that all but seconds equals an uninterrupted run.
"""

import csv
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from costmodel.config.files import MOST_ROWS, read_bytes
from nas.storage import replace_file
from nas.training.diagnostics import Diagnosis

METRICS_FILE = "metrics.csv"
DIAGNOSTICS_FILE = "diagnostics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step: losses before it, in nats per token; seconds since the trial began, in all its processes.

    penalty: penalty of the entropy regulariser, without its weight. val_loss: only at rungs.
    """

    step: int
    tokens: int
    learning_rate: float
    train_loss: float
    penalty: float
    gradient_norm: float
    seconds: float
    val_loss: float | None = None


COLUMNS = tuple(field.name for field in fields(StepMetrics))


class MetricsLog:
    """Appends steps; `flush` writes them to disk. Raises OSError, e.g. if the disk is full."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported late, because it takes 1.5 seconds

        folder.mkdir(parents=True, exist_ok=True)
        header = ",".join(COLUMNS) + "\n"
        _keep_until(folder / METRICS_FILE, last_step, header, lambda row: int(row.split(",", 1)[0]))
        _keep_until(folder / DIAGNOSTICS_FILE, last_step, "", lambda line: int(json.loads(line)["step"]))
        self._file = (folder / METRICS_FILE).open("a", newline="", encoding="utf-8")
        self._diagnostics = (folder / DIAGNOSTICS_FILE).open("a", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=last_step + 1)

    def add(self, metrics: StepMetrics) -> None:
        row = asdict(metrics)
        self._writer.writerow(["" if row[name] is None else repr(row[name]) for name in COLUMNS])
        for name in COLUMNS[2:]:
            if row[name] is not None:
                self._board.add_scalar(name, row[name], metrics.step)

    def add_diagnosis(self, diagnosis: Diagnosis) -> None:
        self._diagnostics.write(json.dumps(asdict(diagnosis)) + "\n")

    def flush(self) -> None:
        for file in (self._file, self._diagnostics):
            file.flush()
            os.fsync(file.fileno())
        self._board.flush()

    def close(self) -> None:
        self._file.close()
        self._diagnostics.close()
        self._board.close()


def _keep_until(path: Path, last_step: int, header: str, step_of: Callable[[str], int]) -> None:
    """Rewrite a file with a header and the lines up to a step or the first torn line."""
    lines: list[str] = []
    if path.exists() and last_step:
        text = read_bytes(path, MOST_ROWS).decode(errors="replace")
        for line in text.splitlines(keepends=True)[1 if header else 0 :]:
            try:
                if not line.endswith("\n") or step_of(line) > last_step:
                    break
            except (ValueError, KeyError, TypeError, RecursionError):  # torn, or not written here
                break
            lines.append(line)
    replace_file(path, header + "".join(lines))
