"""Whom a price trusts: how many parties, against whom they are safe, and who makes their correlated randomness.

Sources: SecretFlow-SPU 0.9.5, docs/reference/mpc_status.rst (https://github.com/secretflow/spu), the configuration that
runs are made with, and the protocols' own papers.
"""

from dataclasses import asdict, dataclass
from typing import Any

SEMI_HONEST = "semi-honest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """What has to hold for a protocol to hide anything.

    num_parties: that compute, as priced and measured. more_parties: whether there may be more.
    adversary: what corrupted parties do. max_corrupted: how many of the parties may be, whoever they are.
    randomness: who makes the correlated randomness, in words. dealer: whether that is someone to be trusted.
    """

    num_parties: int
    adversary: str
    max_corrupted: int
    randomness: str
    dealer: bool
    more_parties: bool = False

    @property
    def threshold(self) -> str:
        """The corruption threshold by its name."""
        return "honest majority" if 2 * self.max_corrupted < self.num_parties else "dishonest majority"


TRUST: dict[str, Trust] = {
    # arXiv 2410.13060 and 2501.03489: client and server on SecretFlow-SPU under Cheetah.
    "published": Trust(
        num_parties=2,
        adversary=SEMI_HONEST,
        max_corrupted=1,
        randomness="the two parties themselves, as in the papers (Cheetah)",
        dealer=False,
    ),
    # Cramer et al. 2018, https://eprint.iacr.org/2018/482, without its authentication. `beaver_type` is the engine's
    # default, TrustedFirstParty, which its manual keeps for debugging: the first party draws every other party's seed.
    # TrustedThirdParty asks a server that takes no part.
    "semi2k": Trust(
        num_parties=2,
        adversary=SEMI_HONEST,
        max_corrupted=1,
        randomness="a trusted dealer; as measured, the engine's first party, which could unmask everything",
        dealer=True,
        more_parties=True,
    ),
    # Mohassel and Rindal 2018, https://eprint.iacr.org/2018/403, section 3.
    "aby3": Trust(
        num_parties=3,
        adversary=SEMI_HONEST,
        max_corrupted=1,
        randomness="none but seeds that pairs of parties share",
        dealer=False,
    ),
    # Huang et al. 2022, https://eprint.iacr.org/2022/207, section 2.
    "cheetah": Trust(
        num_parties=2,
        adversary=SEMI_HONEST,
        max_corrupted=1,
        randomness="the two parties themselves, by lattice encryption and oblivious transfer",
        dealer=False,
    ),
}


def facts(trust: Trust) -> dict[str, Any]:
    """All of it as plain data."""
    return {**asdict(trust), "threshold": trust.threshold}


def described(trust: Trust) -> str:
    """All of it in a line."""
    return (
        f"{trust.num_parties} parties{' (or more)' if trust.more_parties else ''}, {trust.adversary}, "
        f"{trust.threshold} (at most {trust.max_corrupted} corrupted); "
        f"correlated randomness: {trust.randomness}"
    )


def caption(trust: Trust) -> str:
    """The shortest form, for figures."""
    dealer = ", trusted dealer" if trust.dealer else ""
    return f"{trust.num_parties} parties, {trust.adversary}, {trust.threshold}{dealer}"
