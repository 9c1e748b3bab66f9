"""Compares protocol `sigma` with published runs: bytes, keys and rounds exactly, seconds within a range."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from costmodel.calibration.sigma_rows import SigmaRow, run_bytes, run_key_bytes, whole
from costmodel.calibration.validate_published import Check
from costmodel.ops import Node
from costmodel.protocols import sigma
from costmodel.protocols.sigma import class_of
from costmodel.protocols.sigma_primitives import inverse_root

GIBIBYTE = 2**30
SECONDS_BAR = 0.25  # greatest error of a held-out row whose range does not contain its seconds
KEYS_BAR = 0.001


class Seconds(NamedTuple):
    """Seconds of a run: `told` as printed, or from a log without waiting for bytes; the others are predictions."""

    told: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.told - 1

    @property
    def in_range(self) -> bool:
        """Whether the error is within the bound, or the predicted range contains `told`."""
        return abs(self.error) <= SECONDS_BAR or self.low <= self.told <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A row and its prediction; `seconds` is None if the source has none."""

    row: SigmaRow
    sent_bytes: int
    key_bytes: int
    gpu_rounds: int
    seconds: Seconds | None

    @property
    def bytes_match(self) -> bool:
        """Whether bytes are equal, to the last printed digit if they are printed; true if the source has no bytes."""
        if self.row.sent_bytes is not None:
            return self.sent_bytes == self.row.sent_bytes
        printed = self.row.sent_gibibytes
        return printed is None or f"{self.sent_bytes / GIBIBYTE:.{len(printed.partition('.')[2])}f}" == printed


def checked(row: SigmaRow) -> Checked:
    return Checked(
        row=row,
        sent_bytes=run_bytes(row),
        key_bytes=run_key_bytes(row),
        gpu_rounds=whole(row).rounds - num_norms(row) * inverse_root(1, row.ring_bits).rounds,
        seconds=None if row.latency_s is None else _seconds(row, row.latency_s),
    )


def _seconds(row: SigmaRow, latency_s: float) -> Seconds:
    pricer = sigma.load(row.network, setting=row.setting)
    nodes = [Node(name=str(at), layer=0, op=op, inputs=("tokens",)) for at, op in enumerate(row.ops)]
    predicted = sum(pricer.price(node.op).latency_s for node in nodes)
    range_s = pricer.latency_s_range(nodes)
    assert range_s is not None
    return Seconds(latency_s - (row.comm_s or 0.0), predicted, *range_s)


def num_norms(row: SigmaRow) -> int:
    return sum(class_of(op) == "norm" for op in row.ops)


def sigma_checks(predictions: Sequence[Checked]) -> tuple[Check, ...]:
    """Return the figures with their bounds: shares of rows, and greatest errors."""
    fitted = [prediction.seconds for prediction in predictions if prediction.seconds and prediction.row.fitted]
    held_out = [prediction.seconds for prediction in predictions if prediction.seconds and not prediction.row.fitted]
    keyed = [prediction for prediction in predictions if prediction.row.key_bytes is not None]
    counted = [prediction for prediction in predictions if prediction.row.gpu_rounds is not None]
    keys = [abs(prediction.key_bytes / (prediction.row.key_bytes or 0) - 1) for prediction in keyed]
    return (
        Check("rows whose bytes differ", _share(not prediction.bytes_match for prediction in predictions), 0.0),
        Check(f"keys, worst of {len(keyed)} rows", max(keys), KEYS_BAR),
        Check(
            "rows whose rounds on the GPU differ", _share(row.gpu_rounds != row.row.gpu_rounds for row in counted), 0.0
        ),
        Check("seconds, worst of fitted rows", max(abs(seconds.error) for seconds in fitted)),
        Check(f"seconds, worst of {len(held_out)} held-out rows", max(abs(seconds.error) for seconds in held_out)),
        Check(
            f"held-out rows beyond {SECONDS_BAR:.0%} and their range",
            _share(not seconds.in_range for seconds in held_out),
            0.0,
        ),
    )


def _share(failed: Iterable[bool]) -> float:
    return fmean(map(float, failed))
