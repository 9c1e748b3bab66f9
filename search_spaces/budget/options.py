"""What members of a space are priced under and within which budgets: options of a search and of `search_spaces`."""

from dataclasses import dataclass

from costmodel.config.units import parse_budget
from costmodel.cost import Budget
from costmodel.protocols.by_protocol import asked_of_each, protocols_of

BY_PROTOCOL = ("network", "testbed", "budget_latency", "budget_comm", "budget_keys")  # may be said of each protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetOptions:
    """Prices and budgets; the prices are per token.

    Args:
        budget_latency: most seconds a model may take per token, with a unit, such as 5min; of a search with --parent
            also a share of what that takes, such as 60%.
        budget_comm: most bytes all parties together may send per token, with a unit, such as 8GB, or a share likewise.
        budget_keys: most bytes of keys that a dealer may send each party per token, with a unit, such as 8GB, or a
            share likewise; for protocols with a dealer.
        seq_len: tokens in the prompt, for pricing and, in a search, for training.
        protocol: the MPC protocol that prices a model: published, semi2k, aby3, cheetah, sigma or crypten; or several
            with commas between: members are within the budgets of each, such as --budget-latency semi2k=60s,sigma=2s,
            and the first is that of the front.
        network: between the parties, for protocols other than published: loopback, lan (the default), wan, another
            preset or a .yaml file; for several protocols one for all, or each its own, such as semi2k=lan,sigma=wan.
        testbed: a .yaml file of compute seconds from `python -m costmodel calibrate`, instead of the committed ones; of
            several protocols each its own, such as semi2k=mine.yaml.
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
        """Those that price members; a front is of seconds under the first."""
        return protocols_of(self.protocol)

    @property
    def asked(self) -> dict[str, dict[str, str | None]]:
        """What network, testbed and budgets, by name of the field, are said of each protocol."""
        return asked_of_each(self.protocol, {name: getattr(self, name) for name in BY_PROTOCOL})

    @property
    def budgets(self) -> dict[str, Budget]:
        """Budgets by protocol. Raises UserError for one that is no number with a unit."""
        return {
            name: parse_budget(*(said[f"budget_{kind}"] for kind in ("latency", "comm", "keys")))
            for name, said in self.asked.items()
        }
