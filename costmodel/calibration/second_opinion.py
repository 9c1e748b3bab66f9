"""A second opinion on bytes: what another framework's compiler predicts for the same op, beside the formulas here.

It is no measurement, and its protocols are not the engine's: its fractions are cut by another protocol, its comparisons
work on other bits, and its lattice encryption packs products otherwise. For a linear both do the same, so there the
online bytes have to agree within `ONLINE_BAR`.

Source: MP-SPDZ 0.4.2, `compile.py -E dealer-ring|hemi|ring` (https://github.com/data61/MP-SPDZ; Keller 2020,
https://eprint.iacr.org/2020/521): megabytes of all parties, online and offline.
"""

from dataclasses import dataclass

from costmodel import ops
from costmodel.calibration.validate_published import Check
from costmodel.network import NETWORKS
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


def opinions() -> tuple[Opinion, ...]:
    """Every figure, in order."""
    linear, relu = (
        {
            "semi2k": semi2k.comm(op, SETTING).online_bytes,
            "aby3": aby3.comm(op, SETTING).online_bytes,
            **{made.generator.name: made.setup_bytes for made in alternatives([op], SETTING, NETWORKS["loopback"])},
        }
        for op in (LINEAR, RELU)
    )
    figures: tuple[tuple[str, float, float, float | None], ...] = (
        ("linear 128x768x3072, two parties, online", 45.6, linear["semi2k"], ONLINE_BAR),
        ("linear 128x768x3072, three parties, online", 22.0, linear["aby3"], ONLINE_BAR),
        ("linear 128x768x3072, sent by a dealer", 14.9, linear[DEALER], None),
        ("linear 128x768x3072, made under encryption", 915.0, linear[ENCRYPTED], None),
        ("ReLU 128x3072, two parties, online", 29.8, relu["semi2k"], None),
        ("ReLU 128x3072, sent by a dealer", 13.7, relu[DEALER], None),
        ("ReLU 128x3072, three parties, online", 35.8, relu["aby3"], None),
    )
    return tuple(
        Opinion(title=title, other_bytes=megabytes * 1e6, own_bytes=own_bytes, bar=bar)
        for title, megabytes, own_bytes, bar in figures
    )
