"""The fit of the seconds of protocol `sigma`: it takes logged runs and returns the text of the testbed file.

For each class, the seconds of a run minus its share of waiting for bytes are fitted by rounds, key bytes and weights,
with coefficients >= 0 and least squares of relative errors.
"""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from costmodel.calibration.sigma_rows import SigmaRow, by_class
from costmodel.config import strict_yaml
from costmodel.errors import UserError
from costmodel.protocols.primitives import total_comm
from costmodel.protocols.sigma import CLASSES, UNITS, Class, ClassSeconds, SigmaTestbed, Unit, class_of, work
from costmodel.protocols.sigma_programs import comm

MACHINE = "2 x NVIDIA RTX PRO 6000 Blackwell in one machine, a party each, over loopback; published, not measured here"
SIGNIFICANT_DIGITS = 4
SIZES: tuple[Unit, ...] = ("key_bytes", "weights")  # units that vary within a class; rounds are fixed by the type of op


def fit(rows: Sequence[SigmaRow]) -> SigmaTestbed:
    """Return the testbed fitted on rows; a UserError is raised for a held-out row or one without seconds of classes."""
    if unfit := [row.name for row in rows if not row.fitted or not row.class_s]:
        raise UserError(f"a held-out row must not be fitted, but got {', '.join(unfit)}; leave it to `validate`.")
    return SigmaTestbed(
        protocol="sigma",
        machine=MACHINE,
        source=rows[0].source,
        rows=tuple(row.name for row in rows),
        classes={name: _class_seconds(name, rows) for name in CLASSES},
    )


def dump_sigma(testbed: SigmaTestbed) -> str:
    return strict_yaml.dump({**asdict(testbed), "rows": list(testbed.rows)})


def compute_s_of(row: SigmaRow) -> dict[Class, float]:
    """Return the compute seconds of a logged run by class; time that the log does not name is `linear`."""
    assert row.latency_s is not None
    assert row.comm_s is not None
    seconds = {**row.class_s, "linear": row.latency_s - sum(row.class_s.values())}
    costs = by_class(row)
    all_bytes = total_comm(costs.values()).online_bytes
    return {name: seconds[name] - row.comm_s * costs[name].online_bytes / all_bytes for name in CLASSES}


def class_work(row: SigmaRow, name: Class) -> dict[Unit, int]:
    """Return the work of a row's ops of one class, by unit."""
    parts = [work(op, comm(op, row.setting)) for op in row.ops if class_of(op) == name]
    return {unit: sum(part[unit] for part in parts) for unit in UNITS}


def _class_seconds(name: Class, rows: Sequence[SigmaRow]) -> ClassSeconds:
    per_unit_s = _coefficients(name, rows)
    left_out = [(_coefficients(name, [other for other in rows if other is not row]), row) for row in rows]
    parts = [work(op, comm(op, row.setting)) for row in rows for op in set(row.ops) if class_of(op) == name]
    sizes = {unit: [part[unit] for part in parts if part[unit]] for unit in SIZES}
    return ClassSeconds(
        per_unit_s={unit: _rounded(value) for unit, value in per_unit_s.items()},
        least={unit: min(values) for unit, values in sizes.items() if values},
        greatest={unit: max(values) for unit, values in sizes.items() if values},
        worst_error=_rounded(max(_error(name, row, per_unit_s) for row in rows)),
        held_out_error=_rounded(max(_error(name, row, others) for others, row in left_out)),
    )


def _coefficients(name: Class, rows: Sequence[SigmaRow]) -> dict[Unit, float]:
    from costmodel.protocols.linear_fit import least_squares  # imported here, as costs do not need scipy

    seconds = np.array([compute_s_of(row)[name] for row in rows])
    counts = np.array([[class_work(row, name)[unit] for unit in UNITS] for row in rows])
    return dict(zip(UNITS, least_squares(counts / seconds[:, None]).tolist(), strict=True))


def _error(name: Class, row: SigmaRow, per_unit_s: dict[Unit, float]) -> float:
    predicted = sum(per_unit_s[unit] * count for unit, count in class_work(row, name).items())
    return abs(predicted / compute_s_of(row)[name] - 1)


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
