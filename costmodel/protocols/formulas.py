"""The protocols that an MPC engine (SecretFlow-SPU or CrypTen) runs: the formulas of each, and whom you must trust.

Sources for trust: docs/reference/mpc_status.rst of SecretFlow-SPU 0.9.5 (https://github.com/secretflow/spu), the
configuration used for runs, and the protocols' own papers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from costmodel.ops import Op
from costmodel.protocols import aby3, cheetah, cheetah_preprocessing, crypten, semi2k
from costmodel.protocols.op_programs import matrix_work
from costmodel.protocols.primitives import Calls, Comm, EngineSetting, one_by_one
from costmodel.trust import Trust


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProtocol:
    """A protocol that an MPC engine runs.

    engine: Name of the engine's Python package.
    setting: The class of the protocol's settings.
    trust: Whom you must trust, and the number of computing parties.
    comm: Function of an op and a setting that returns the op's cost, independent of the ops before it.
    in_order: Function of a run's ops and a setting that returns the cost of each op, in order, in a run that starts
        without preprocessing; None if no op's cost depends on the ops before it.
    num_shares: Number of ring elements that make up one party's share of an element.
    keeps_masks: Whether a run can reuse the masks of weights from an earlier run.
    matrix_work: Function of calls that returns the amounts of work of their matrix products, by unit.
    is_slow: Whether an op of GPT-2's size takes minutes; calibration then repeats less and omits the largest ops.
    deals_ahead: Whether a dealer prepares the next ops while the parties compute.
    fraction_bits: Numbers of fraction bits, of which a run takes the first that keeps the model's numbers in range.
        If empty, a run takes the number in its setting.
    """

    engine: str = "spu"
    setting: type[EngineSetting] = EngineSetting
    trust: Trust
    comm: Callable[[Op, Any], Comm]
    in_order: Callable[[Sequence[Op], EngineSetting], tuple[Comm, ...]] | None = None
    num_shares: int
    keeps_masks: bool = False
    matrix_work: Callable[[Calls], dict[str, int]] = matrix_work
    is_slow: bool = False
    deals_ahead: bool = False
    fraction_bits: tuple[int, ...] = ()

    def walk(self, some: Sequence[Op], setting: EngineSetting) -> tuple[Comm, ...]:
        """Return the cost of each op of a run, in order; the run starts without preprocessing."""
        return one_by_one(self.comm, some, setting) if self.in_order is None else self.in_order(some, setting)


ENGINE_PROTOCOLS: dict[str, EngineProtocol] = {
    # Cramer et al. 2018, https://eprint.iacr.org/2018/482, without its authentication. `beaver_type` is the engine's
    # default, TrustedFirstParty, which its manual keeps for debugging: the first party draws every other party's seed.
    # TrustedThirdParty asks a server that takes no part.
    "semi2k": EngineProtocol(
        trust=Trust(
            num_parties=semi2k.NUM_PARTIES,
            randomness="a trusted dealer; as measured, the engine's first party, which could unmask everything",
            dealer=True,
            more_parties=True,
        ),
        comm=semi2k.comm,
        num_shares=1,
        keeps_masks=True,
    ),
    # Mohassel and Rindal 2018, https://eprint.iacr.org/2018/403, section 3.
    "aby3": EngineProtocol(
        trust=Trust(
            num_parties=aby3.NUM_PARTIES,
            randomness="none but seeds that pairs of parties share",
            dealer=False,
        ),
        comm=aby3.comm,
        num_shares=2,
    ),
    # Huang et al. 2022, https://eprint.iacr.org/2022/207, section 2.
    "cheetah": EngineProtocol(
        trust=Trust(
            num_parties=cheetah_preprocessing.NUM_PARTIES,
            randomness="the two parties themselves, by lattice encryption and oblivious transfer",
            dealer=False,
        ),
        comm=cheetah.comm,
        in_order=cheetah.walk,
        num_shares=1,
        matrix_work=cheetah.matrix_work,
        is_slow=True,
    ),
    # Knott et al. 2021, section 3; provider TTP. Its default, TFP, where the first party is the dealer and could unmask
    # everything, is not run here. More than two parties truncate together, for which there is no formula here.
    "crypten": EngineProtocol(
        engine="crypten",
        setting=crypten.CryptenSetting,
        trust=Trust(
            num_parties=crypten.NUM_PARTIES,
            randomness="a dealer, a separate process, which sees no shares; with a party, it could unmask all",
            dealer=True,
        ),
        comm=crypten.comm,
        num_shares=1,
        deals_ahead=True,
        fraction_bits=(16, 15, 14, 13),  # with fewer, an exponential has too few digits
    ),
}
