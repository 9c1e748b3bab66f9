"""Protocols and budgets of the members of a space: options of a search and of `python -m search_spaces`."""

from dataclasses import dataclass

from costmodel.config.units import parse_budget
from costmodel.cost import Budget
from costmodel.protocols.flags_per_protocol import options_by_protocol, protocols_of

BY_PROTOCOL = ("network", "testbed", "budget_latency", "budget_comm", "budget_keys")  # may be given per protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetOptions:
    """Protocols and budgets; costs are per token.

    Args:
        budget_latency: most seconds per token, such as 5min; in a search with --parent also a share of the parent's,
            such as 60%.
        budget_comm: most bytes per token that all parties together send, such as 8GB, or a share of the parent's.
        budget_keys: most bytes of keys per token that a dealer sends each party, such as 8GB, or a share of the
            parent's; for protocols with a dealer.
        seq_len: tokens of the prompt, for pricing and, in a search, for training.
        protocol: protocol of the costs: published, semi2k, aby3, cheetah, sigma, crypten, ckks, or module:Class of your
            own; or several separated by commas, whose budgets all apply, such as --budget-latency semi2k=60s,sigma=2s;
            the front uses the first.
        network: network between the parties, for protocols other than published: loopback, lan (the default), wan,
            another preset or a .yaml file; for several protocols one for all, or one each, such as
            semi2k=lan,sigma=wan.
        testbed: a .yaml file of compute seconds from `python -m costmodel calibrate`, instead of the committed one; for
            several protocols one each, such as semi2k=mine.yaml.
    """

    budget_latency: str | None = None
    budget_comm: str | None = None
    budget_keys: str | None = None
    seq_len: int = 128
    protocol: str = "published"
    network: str | None = None
    testbed: str | None = None

    @property
    def protocols(self) -> tuple[str, ...]:
        """The protocols that price members; the front uses seconds under the first."""
        return protocols_of(self.protocol)

    @property
    def asked(self) -> dict[str, dict[str, str | None]]:
        """The network, testbed and budgets of each protocol, by name of the field."""
        return options_by_protocol(self.protocol, {name: getattr(self, name) for name in BY_PROTOCOL})

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budgets by protocol; a UserError is raised for a budget that is not a number with a unit."""
        return {
            name: parse_budget(*(said[f"budget_{kind}"] for kind in ("latency", "comm", "keys")))
            for name, said in self.asked.items()
        }
