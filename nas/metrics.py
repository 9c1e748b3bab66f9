"""The training curve of a trial on disk: metrics.csv, one row a step, and a TensorBoard log of the same.

A resumed trial first drops the rows after its checkpoint, so that the file is what an unbroken run would have written
(but for the seconds).
"""

import csv
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

METRICS_FILE = "metrics.csv"
TENSORBOARD_FOLDER = "tensorboard"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step: losses in nats per token before it; seconds since the trial began, in all its processes.

    penalty: of the entropy regulariser, before its weight. val_loss: only on rungs.
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
    """Appends steps; `flush` puts them on disk. Raises OSError, e.g. when the disk is full."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second and a half that a run without a log is spared

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        _keep_until(path, last_step)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=last_step + 1)

    def add(self, metrics: StepMetrics) -> None:
        row = asdict(metrics)
        self._writer.writerow(["" if row[name] is None else repr(row[name]) for name in COLUMNS])
        for name in COLUMNS[2:]:
            if row[name] is not None:
                self._board.add_scalar(name, row[name], metrics.step)

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _keep_until(path: Path, last_step: int) -> None:
    """Rewrites the file with a header and the rows up to a step; a torn row ends them."""
    rows: list[str] = []
    if path.exists() and last_step:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[1:]:
            step = line.split(",", 1)[0]
            if not line.endswith("\n") or not step.isdigit() or int(step) > last_step:
                break
            rows.append(line)
    draft = path.with_suffix(".draft")
    with draft.open("w", newline="", encoding="utf-8") as file:
        file.write(",".join(COLUMNS) + "\r\n" + "".join(rows))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
