"""How well protocol `sigma` tells what is published of its runs: bytes, keys and rounds exactly, seconds in a range."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from costmodel.calibration.sigma_rows import SigmaRow, run_bytes, run_key_bytes, whole
from costmodel.calibration.validate_published import Check
from costmodel.ops import Node
from costmodel.protocols import sigma
from costmodel.protocols.sigma_primitives import inverse_root
from costmodel.protocols.sigma_testbed import class_of

GIBIBYTE = 2**30
SECONDS_BAR = 0.25  # of a held-out row, or its range holds it
KEYS_BAR = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A row beside its prediction. latency_s: what is predicted of `told_s`; both None where its source has none.

    told_s: printed, or of a log on one machine, computed: what it did not wait for bytes.
    """

    row: SigmaRow
    sent_bytes: int
    key_bytes: int
    gpu_rounds: int
    told_s: float | None
    latency_s: float | None
    latency_s_range: tuple[float, float] | None

    @property
    def error(self) -> float | None:
        return None if self.told_s is None or self.latency_s is None else self.latency_s / self.told_s - 1

    @property
    def in_range(self) -> bool:
        """Whether the seconds are within the bar, or the range says that they may not be."""
        if self.told_s is None or self.latency_s_range is None or self.error is None:
            return True
        return abs(self.error) <= SECONDS_BAR or self.latency_s_range[0] <= self.told_s <= self.latency_s_range[1]

    @property
    def bytes_match(self) -> bool:
        return _matches(self.row.sent_bytes, self.row.sent_gibibytes, self.sent_bytes)


def checked(row: SigmaRow) -> Checked:
    told_s = latency_s = latency_s_range = None
    if row.latency_s is not None:
        pricer = sigma.load(row.network, setting=row.setting)
        nodes = [Node(name=str(at), layer=0, op=op, inputs=("tokens",)) for at, op in enumerate(row.ops)]
        told_s = row.latency_s - (row.comm_s or 0.0)
        latency_s = sum(pricer.price(node.op).latency_s for node in nodes)
        latency_s_range = pricer.latency_s_range(nodes)
    return Checked(
        row=row,
        sent_bytes=run_bytes(row),
        key_bytes=run_key_bytes(row),
        gpu_rounds=whole(row).rounds - num_norms(row) * inverse_root(1, row.ring_bits).rounds,
        told_s=told_s,
        latency_s=latency_s,
        latency_s_range=latency_s_range,
    )


def num_norms(row: SigmaRow) -> int:
    return sum(class_of(op) == "norm" for op in row.ops)


def sigma_checks(found: Sequence[Checked]) -> tuple[Check, ...]:
    """Figures with their bars; shares of rows, and greatest errors."""
    held_out = [each for each in found if not each.row.fitted and each.error is not None]
    keyed = [each for each in found if each.row.key_bytes is not None]
    counted = [each for each in found if each.row.gpu_rounds is not None]
    return (
        Check(name="rows whose bytes differ", value=_share(found, lambda each: not each.bytes_match), bar=0.0),
        Check(
            name=f"keys, worst of {len(keyed)} rows",
            value=max(abs(each.key_bytes / (each.row.key_bytes or 0) - 1) for each in keyed),
            bar=KEYS_BAR,
        ),
        Check(
            name="rows whose rounds on the GPU differ",
            value=_share(counted, lambda each: each.gpu_rounds != each.row.gpu_rounds),
            bar=0.0,
        ),
        Check(
            name="seconds, worst of fitted rows",
            value=max(abs(each.error or 0.0) for each in found if each.row.fitted),
        ),
        Check(
            name=f"seconds, worst of {len(held_out)} held-out rows",
            value=max(abs(each.error or 0.0) for each in held_out),
        ),
        Check(
            name=f"held-out rows beyond {SECONDS_BAR:.0%} and their range",
            value=_share(held_out, lambda each: not each.in_range),
            bar=0.0,
        ),
    )


def _share(some: Sequence[Checked], failed: Callable[[Checked], bool]) -> float:
    return sum(map(failed, some)) / len(some)


def _matches(exact: int | None, printed: str | None, found: int) -> bool:
    """To the byte, or to the last digit that is printed; whatever is found where the source has neither."""
    if exact is not None:
        return found == exact
    return printed is None or f"{found / GIBIBYTE:.{len(printed.partition('.')[2])}f}" == printed
