"""A second opinion on bytes: what another framework's compiler predicts for the same op, beside the formulas here.

It is no measurement, and its protocols are not the engine's: its fractions are cut by another protocol, its comparisons
work on other bits, and its lattice encryption packs products otherwise. For a linear both do the same, so there the
online bytes have to agree within `ONLINE_BAR`.

Source: MP-SPDZ 0.4.2, `compile.py -E dealer-ring|hemi|ring` (https://github.com/data61/MP-SPDZ; Keller 2020,
https://eprint.iacr.org/2020/521): megabytes of all parties, online and offline.
"""

from collections.abc import Callable
from dataclasses import dataclass

from costmodel import ops
from costmodel.calibration.validate_published import Check
from costmodel.network import NETWORKS
from costmodel.ops import Op
from costmodel.protocols import aby3, semi2k
from costmodel.protocols.primitives import EngineSetting
from costmodel.randomness import ENCRYPTED, alternatives

DEALER = "separate dealer, over the network"
ONLINE_BAR = 0.10

LINEAR = ops.Linear(rows=128, in_features=768, out_features=3072, bias=False)
RELU = ops.Relu(rows=128, features=3072)
SETTING = EngineSetting()


@dataclass(frozen=True, kw_only=True, slots=True)
class Opinion:
    """One figure of the other framework, and ours. bar: the greatest relative difference that passes, if any."""

    title: str
    other_bytes: float
    own_bytes: float
    bar: float | None = None

    @property
    def check(self) -> Check:
        difference = abs(self.own_bytes / self.other_bytes - 1)
        return Check(name=f"difference from MP-SPDZ: {self.title}", value=difference, bar=self.bar)


def _semi2k(op: Op) -> float:
    return semi2k.comm(op, SETTING).online_bytes


def _aby3(op: Op) -> float:
    return aby3.comm(op, SETTING).online_bytes


def _made_by(name: str) -> Callable[[Op], float]:
    def setup_bytes(op: Op) -> float:
        made = alternatives([op], SETTING, NETWORKS["loopback"])
        return next(way.setup_bytes for way in made if way.generator.name == name)

    return setup_bytes


# what it is, its op, MB by the other framework, bytes by ours, and the bar
FIGURES: tuple[tuple[str, Op, float, Callable[[Op], float], float | None], ...] = (
    ("linear 128x768x3072, two parties, online", LINEAR, 45.6, _semi2k, ONLINE_BAR),
    ("linear 128x768x3072, three parties, online", LINEAR, 22.0, _aby3, ONLINE_BAR),
    ("linear 128x768x3072, sent by a dealer", LINEAR, 14.9, _made_by(DEALER), None),
    ("linear 128x768x3072, made under encryption", LINEAR, 915.0, _made_by(ENCRYPTED), None),
    ("ReLU 128x3072, two parties, online", RELU, 29.8, _semi2k, None),
    ("ReLU 128x3072, sent by a dealer", RELU, 13.7, _made_by(DEALER), None),
    ("ReLU 128x3072, three parties, online", RELU, 35.8, _aby3, None),
)


def opinions() -> tuple[Opinion, ...]:
    """Every figure, in order."""
    return tuple(
        Opinion(title=title, other_bytes=megabytes * 1e6, own_bytes=own(op), bar=bar)
        for title, op, megabytes, own, bar in FIGURES
    )
