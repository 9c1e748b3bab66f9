from dataclasses import replace

import pytest

from costmodel import ops
from costmodel.calibration.printed_rows import (
    own_bytes,
    printed_checks,
    printed_rows,
    shaft_activation,
    shaft_softmax,
)

ROWS = printed_rows()


def test_runs_of_crypten_are_equal_to_the_last_digit() -> None:
    checks = [check for check in printed_checks(ROWS) if check.row.group == "CrypTen as run by SIGMA"]
    assert [check.row.gigabytes for check in checks] == ["8.34", "3.45", "3.27", ".11", "3.92", "8.34", "21.11"]
    assert all(check.is_equal and check.factor is None for check in checks)
    # x sigmoid(1.702 x): a sign, an exponential, two iterations, four products and a selection, of 16 bytes a number
    assert own_bytes(checks[1].row) == 12 * 128 * 3072 * 16 * (27 + 2 + 8 + 6 + 4 + 2)


def test_shafts_functions_send_what_it_prints() -> None:
    """354 MB and 19 rounds for a GELU of 128 x 3,072: a ReLU, a sign, an opening and a product, of 8 bytes a share."""
    comm = shaft_activation(ops.Silu(rows=128, features=3072))
    assert comm.online_bytes == 128 * 3072 * (464 + 432 + 16 + 32) == 354 * 2**20
    assert comm.rounds == 9 + 8 + 1 + 1
    # scores are clipped at both ends by a ReLU each; 16 steps of two products
    assert shaft_softmax(ops.Softmax(heads=1, queries=1, keys=4)).online_bytes == 4 * (2 * 464 + 16 * 2 * 32)


@pytest.mark.parametrize(
    ("protocol", "num_held_out", "bar"), [("crypten", 2, 0.003), ("aby3", 4, 0.05), ("cheetah", 1, 0.02)]
)
def test_held_out_rows_are_near_by_the_factor_of_one(protocol: str, num_held_out: int, bar: float) -> None:
    checks = [check for check in printed_checks(ROWS) if check.row.protocol == protocol and check.factor is not None]
    held_out = [check for check in checks if not check.row.fitted]
    assert len(held_out) == num_held_out
    assert all(abs(check.error) < bar for check in held_out)
    assert all(check.error == pytest.approx(0) for check in checks if check.row.fitted)


@pytest.mark.parametrize("protocol", ["crypten", "aby3", "cheetah"])
def test_validate_prints_them(run, protocol: str) -> None:
    code, out, _ = run("validate", "--protocol", protocol)
    assert code == 0
    assert all(row.name in out for row in ROWS if row.protocol == protocol)


def test_validate_fails_when_a_printed_digit_differs(run, monkeypatch) -> None:
    off = tuple(replace(row, gigabytes="8.35") if row.gigabytes == "8.34" else row for row in ROWS)
    monkeypatch.setattr("costmodel.commands.validate.printed_rows", lambda: off)
    code, out, _ = run("validate", "--protocol", "crypten")
    assert code == 1
    assert "FAIL" in out
